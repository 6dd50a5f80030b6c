"""`python -m services.decode`."""

from fabric.server import run
from services.decode.service import build
from services.decode.settings import DecodeSettings
from services.worker.preflight import check

if __name__ == "__main__":
    run(DecodeSettings, build, check)
