"""The check of whether the hub is reachable."""

from __future__ import annotations

import httpx

from data.hub import unreachable


def test_a_refused_connection_is_a_reason_but_an_unusable_client_is_not(monkeypatch):
    unreachable.cache_clear()
    assert unreachable("http://127.0.0.1:9").startswith("http://127.0.0.1:9: ")  # nothing listens on the discard port

    def no_socks(*args, **kwargs):
        raise ImportError("Using SOCKS proxy, but the 'socksio' package is not installed")

    monkeypatch.setattr(httpx, "head", no_socks)
    unreachable.cache_clear()
    assert unreachable("http://127.0.0.1:9") == "", "the hub's client may reach it"
    unreachable.cache_clear()
