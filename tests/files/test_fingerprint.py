"""Digests of records by content."""

import mocha_jax as mj
from mocha_jax._files.fingerprint import fingerprint


def test_a_record_keeps_its_digest_when_its_module_is_renamed(monkeypatch):
    digest = fingerprint(mj.losses.SmoothedHinge(0.5))
    monkeypatch.setattr(mj.losses.SmoothedHinge, "__module__", "mocha_jax.losses._elsewhere")
    assert fingerprint(mj.losses.SmoothedHinge(0.5)) == digest
    monkeypatch.setattr(mj.losses.SmoothedHinge, "__module__", "another.losses")
    assert fingerprint(mj.losses.SmoothedHinge(0.5)) != digest
