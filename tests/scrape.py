"""Reads a metrics server as Prometheus does."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families

Samples = dict[str, float]


def scrape(port: int, host: str = "127.0.0.1") -> Samples:
    """All samples, by name and labels: `airside_kv_blocks{state="free"}`; labels in alphabetical order."""
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=20) as reply:
        assert reply.headers["Content-Type"].startswith("text/plain; version=")
        text = reply.read().decode()
    return samples_of(text)


def samples_of(text: str) -> Samples:
    """The same of the text of an answer."""
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, f"{family.name} says not what it is"
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            key = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert key not in samples, f"{key} twice"
            samples[key] = sample.value
    return samples
