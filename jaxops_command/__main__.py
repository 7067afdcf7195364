"""The command without its entry point: `python -m jaxops_command`."""

from jaxops_command.app import app

app()
