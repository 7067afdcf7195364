"""The `jaxops` command, for `python -m jaxops`."""

from jaxops_command.app import app

if __name__ == "__main__":
    app()
