"""A package with a recipe, as users write one: ``test_added_recipe.py`` installs it."""

from shoal.recipes import Command, Recipe

DIGITS = Recipe(
    module="digits_recipe.digits",
    config="DigitsConfig",
    preset="tiny",
    help="Train a network to read the digits of clocks.",
    example="shoal train digits --run.dir runs/digits",
    predict=Command(name="digits", help="Read digits.", details="Each line has segments.", inputs="Files."),
    evaluate=Command(name="digits", help="Score digits.", details="Each line has a digit.", inputs="Files."),
)
