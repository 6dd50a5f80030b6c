"""`python -m services.gateway`."""

from fabric.server import run
from services.gateway.build import build, check
from services.gateway.settings import GatewaySettings

if __name__ == "__main__":
    run(GatewaySettings, build, check)
