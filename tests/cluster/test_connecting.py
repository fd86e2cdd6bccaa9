"""A cluster that is not there is told at once, with the remedy."""

from __future__ import annotations

import socket

import pytest

from elastic_train.cluster.driver.launch import joined
from elastic_train.cluster.ray_calls import connect
from elastic_train.errors import ConfigError

pytestmark = pytest.mark.ring2


def test_an_address_where_nothing_listens_is_told() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]  # bound, and nobody listens
        with pytest.raises(ConfigError, match=rf"no Ray cluster to join at 127\.0\.0\.1:{port}.*RAY_ADDRESS"):
            connect(f"127.0.0.1:{port}")


def test_the_address_is_that_of_a_person_or_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert joined(None) is None
    assert joined("local") is None
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert joined(None) == "10.0.0.1:6379"
    assert joined("10.0.0.2:6379") == "10.0.0.2:6379"
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert joined(None) is None


def test_rays_client_is_refused_with_the_way_to_submit() -> None:
    with pytest.raises(ConfigError, match=r"ray://.*is for Ray's client.*ray job submit"):
        joined("ray://head:10001")
