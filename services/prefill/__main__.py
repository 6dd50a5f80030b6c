"""`python -m services.prefill`."""

from fabric.server import run
from services.prefill.service import build
from services.prefill.settings import PrefillSettings
from services.worker.preflight import check

if __name__ == "__main__":
    run(PrefillSettings, build, check)
