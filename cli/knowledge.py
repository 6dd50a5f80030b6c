"""Check of a gateway that runs: how well it knows what workers cache. Reads its metrics, no more."""

from collections.abc import Iterable
from functools import partial

import httpx2

from cli.doctor import Check, Finding, Health
from cli.runtime import StackRecord

_ANSWER_S = 2.0
_METRIC = 'deepinfer_gateway_cache_knowledge_workers{{knowledge="{}"}} '


def checks(stacks: Iterable[StackRecord]) -> dict[str, Check]:
    """One check for the gateway of each stack, by its name."""
    several = len(stacks := list(stacks)) > 1
    return {f"gateway of {one.pid}" if several else "gateway": partial(_asked, one.http) for one in stacks if one.http}


def judge(metrics: str) -> Finding:
    """What a gateway's metrics say of the caches of the workers that it uses."""
    exact, degraded = _count(metrics, "exact"), _count(metrics, "degraded")
    if not degraded:
        return Finding(Health.OK, f"knows exactly what {exact} workers cache")
    fix = "it asks again by itself; if it stays, see its log for the reason and the workers' load"
    return Finding(Health.WARN, f"knows in part what {degraded} of {exact + degraded} workers cache", fix)


def _asked(http: str) -> Finding:
    try:
        reply = httpx2.get(f"http://{http}/metrics", timeout=_ANSWER_S)
        reply.raise_for_status()
    except httpx2.HTTPError as error:
        return Finding(Health.FAIL, f"{http} does not answer: {type(error).__name__}", "see its log; restart it")
    return judge(reply.text)


def _count(metrics: str, knowledge: str) -> int:
    start = _METRIC.format(knowledge)
    found = next((line.removeprefix(start) for line in metrics.splitlines() if line.startswith(start)), "0")
    return int(float(found))
