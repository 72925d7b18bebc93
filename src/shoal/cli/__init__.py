"""The command line: ``app`` puts together the commands of the other modules."""
