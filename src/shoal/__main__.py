"""``python -m shoal``: the same as the ``shoal`` command."""

from shoal.cli.app import program

if __name__ == "__main__":
    program()
