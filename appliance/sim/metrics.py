"""`/metrics`: the batch's counters in Prometheus text, under the names that vLLM 0.32 publishes."""

from __future__ import annotations

from .batch import Batch
from .counters import Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def write_metrics(batch: Batch, model: str, started_at: float) -> bytes:
    """The whole page. `started_at` is the process's start in seconds of the epoch: it tells a restart from a lull."""
    counters, sizes = batch.counters, batch.sizes
    page = _Page(model)
    page.family("process_start_time_seconds", "gauge", "Start of the process in seconds of the epoch.")
    page.lines.append(f"process_start_time_seconds {started_at!r}")
    page.gauge("vllm:num_requests_running", batch.running, "Sequences that hold a batch slot.")
    page.gauge("vllm:num_requests_waiting", batch.waiting, "Sequences that wait for a slot or for blocks.")
    page.gauge("vllm:kv_cache_usage_perc", batch.kv_usage, "Share of the KV blocks that are held, 0 to 1.")
    page.counter("vllm:prefix_cache_queries_total", counters.prefix_queries, "Prompt tokens looked up in the cache.")
    page.counter("vllm:prefix_cache_hits_total", counters.prefix_hits, "Prompt tokens found there.")
    page.counter("vllm:num_preemptions_total", 0, "Always 0: a sequence holds its blocks from the start.")
    page.counter("vllm:prompt_tokens_total", counters.prompt_tokens, "Prompt tokens, cached ones included.")
    page.counter("vllm:prompt_tokens_cached_total", counters.cached_tokens, "Prompt tokens not computed again.")
    page.counter("vllm:generation_tokens_total", counters.generation_tokens, "Tokens made.")
    page.family("vllm:request_success_total", "counter", "Sequences that ended, by reason.")
    for reason, count in counters.finished.items():
        page.sample("vllm:request_success_total", count, finished_reason=reason)
    page.histogram("vllm:time_to_first_token_seconds", counters.first_token_s, "Queueing and prefill.")
    page.histogram("vllm:inter_token_latency_seconds", counters.inter_token_s, "One decode step, once per member.")
    page.histogram("vllm:request_queue_time_seconds", counters.queue_s, "Waiting for a slot and for blocks.")
    page.histogram("vllm:e2e_request_latency_seconds", counters.request_s, "From arrival to the last token.")
    page.family("vllm:cache_config_info", "gauge", "Sizes of the KV cache.")
    page.sample(
        "vllm:cache_config_info",
        1,
        block_size=str(sizes.block_tokens),
        enable_prefix_caching=str(sizes.prefix_cache_blocks > 0),
        kv_cache_size_tokens=str(sizes.context_tokens),
        num_gpu_blocks=str(sizes.kv_blocks),
    )
    # vLLM does not publish its batch size; a router that meets a sim may know it.
    page.gauge("sim:max_num_seqs", sizes.max_num_seqs, "Batch slots.")
    page.gauge("sim:prefix_cache_blocks", len(batch.prefixes), "Blocks in the prefix cache now.")
    return "\n".join(page.lines).encode() + b"\n"


class _Page:
    """Lines of Prometheus text, each sample with the labels that vLLM gives all of its own."""

    def __init__(self, model: str) -> None:
        self.lines: list[str] = []
        self._labels = f'engine="0",model_name="{_escaped(model)}"'

    def family(self, name: str, kind: str, text: str) -> None:
        self.lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]

    def sample(self, name: str, value: float, **labels: str) -> None:
        more = "".join(f',{key}="{_escaped(text)}"' for key, text in labels.items())
        self.lines.append(f"{name}{{{self._labels}{more}}} {float(value)!r}")

    def gauge(self, name: str, value: float, text: str) -> None:
        self.family(name, "gauge", text)
        self.sample(name, value)

    def counter(self, name: str, value: float, text: str) -> None:
        self.family(name, "counter", text)
        self.sample(name, value)

    def histogram(self, name: str, histogram: Histogram, text: str) -> None:
        self.family(name, "histogram", text)
        seen = 0
        for bound, count in zip((*map(repr, histogram.bounds), "+Inf"), histogram.counts, strict=True):
            seen += count
            self.sample(f"{name}_bucket", seen, le=bound)
        self.sample(f"{name}_count", seen)
        self.sample(f"{name}_sum", histogram.total)


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
