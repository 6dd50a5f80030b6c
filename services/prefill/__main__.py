"""`python -m services.prefill`."""

from fabric.server import run
from services.prefill.service import build
from services.prefill.settings import PrefillSettings

run(PrefillSettings, build)
