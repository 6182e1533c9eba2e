"""The metrics page of an engine's server, with the connector's metrics alone."""

import functools

import prometheus_client

from kvpatch_jax.serving.vllm.engine_metrics import METRICS, PREFIX, PrometheusRecorder


class Page:
    """The page of one or more engines."""

    def __init__(self, engines=(0,)):
        self.registry = prometheus_client.CollectorRegistry()
        counter = functools.partial(prometheus_client.Counter, registry=self.registry)
        gauge = functools.partial(prometheus_client.Gauge, registry=self.registry)
        values = {number: ["tiny", str(number)] for number in engines}
        self.recorder = PrometheusRecorder(counter, gauge, ["model_name", "engine"], values)

    def value(self, name, word="", engine=0):
        """A sample's value; None if it is not on the page."""
        labels = {"model_name": "tiny", "engine": str(engine)} | ({METRICS[name].label: word} if word else {})
        ending = "_total" if METRICS[name].kind == "counter" else ""
        return self.registry.get_sample_value(f"{PREFIX}{name}{ending}", labels)
