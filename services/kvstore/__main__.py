"""`python -m services.kvstore`."""

from fabric.server import run
from services.kvstore.preflight import check
from services.kvstore.service import build
from services.kvstore.settings import KvStoreSettings

if __name__ == "__main__":
    run(KvStoreSettings, build, check)
