"""`python -m services.recipe`."""

from fabric.server import run
from services.recipe.service import build, check
from services.recipe.settings import RecipeSettings

if __name__ == "__main__":
    run(RecipeSettings, build, check)
