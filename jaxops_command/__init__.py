"""The `jaxops` command.

`app` and `options` import neither JAX nor this library, so that help and refusals of what was typed take a fraction of
a second; what a subcommand does stands in a module that `app` imports when the subcommand runs.
"""
