"""`python -m services.kvstore`."""

from fabric.server import run
from services.kvstore.service import build
from services.kvstore.settings import KvStoreSettings

run(KvStoreSettings, build)
