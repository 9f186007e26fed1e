"""The check of whether the hub is reachable."""

from __future__ import annotations

import httpx

from data.hub import unreachable


def test_a_rejected_connection_is_a_reason_and_a_client_that_cannot_be_used_is_not(monkeypatch):
    unreachable.cache_clear()
    assert unreachable("http://127.0.0.1:9").startswith("http://127.0.0.1:9: ")  # nothing listens on the discard port

    def no_socks(*args, **kwargs):
        raise ImportError("Using SOCKS proxy, but the 'socksio' package is not installed")

    monkeypatch.setattr(httpx, "head", no_socks)
    unreachable.cache_clear()
    assert unreachable("http://127.0.0.1:9") == "", "the hub's client may reach it"
    unreachable.cache_clear()
