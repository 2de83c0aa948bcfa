"""`appliance sim`: the built-in engine as a process."""

from __future__ import annotations

import click
import trio

from ..sim.listening import CannotListen
from ..sim.process import run
from ..sim.settings import FAIL_MODES, LOADING_ANSWERS, Misbehaviour, Ranks, Settings, Sizes, Speeds

_SPEED = click.FloatRange(min=0)
_COUNT = click.IntRange(min=1)
_AFTER = click.IntRange(min=0)


@click.command(context_settings={"show_default": True})
@click.option(
    "--port", type=click.IntRange(0, 65535), required=True, help="Port to serve at; 0 lets the kernel choose."
)
@click.option(
    "--model",
    "models",
    multiple=True,
    required=True,
    help="Served name; repeat it for more, the first one is in the metrics.",
)
@click.option("--host", default="127.0.0.1", help="Address to serve at.")
@click.option("--name", default="", help="What answers carry as x-sim-id.  [default: sim-PORT]", show_default=False)
@click.option(
    "--api-key",
    default="",
    envvar="APPLIANCE_SIM_API_KEY",
    show_envvar=True,
    help="Key that /v1 asks for; none by default.",
    show_default=False,
)
@click.option("--keepalive-s", type=_SPEED, default=5.0, help="Close a connection idle for so long; 0 never.")
@click.option(
    "--prefill-tokens-per-second", type=_SPEED, default=50_000.0, help="All prompts together; 0 is instantly."
)
@click.option("--decode-tokens-per-second", type=_SPEED, default=1_000.0, help="Each sequence alone; 0 is instantly.")
@click.option(
    "--decode-slowdown", type=_SPEED, default=0.0, help="S: a step of B sequences takes 1 + S * (B - 1) times as long."
)
@click.option("--max-num-seqs", type=_COUNT, default=256, help="Batch slots.")
@click.option("--kv-blocks", type=_COUNT, default=16_384, help="KV blocks for running sequences.")
@click.option("--block-tokens", type=_COUNT, default=16, help="Tokens of a block.")
@click.option(
    "--prefix-cache-blocks", type=click.IntRange(min=0), default=4_096, help="Blocks of the prefix cache; 0 is none."
)
@click.option("--load-s", type=_SPEED, default=0.0, help="Seconds of loading before it serves.")
@click.option(
    "--while-loading", type=click.Choice(LOADING_ANSWERS), default="refused", help="Refuse connections, or answer 503."
)
@click.option("--fail-after", type=_AFTER, help="Fail after so many requests.")
@click.option("--fail-mode", type=click.Choice(FAIL_MODES), default="exit", help="How --fail-after fails.")
@click.option("--stall-after", type=_AFTER, help="Every answer falls silent after so many words.")
@click.option("--cut-after", type=_AFTER, help="Every answer is cut off after so many words.")
@click.option("--nnodes", type=_COUNT, default=1, help="Processes that together are this engine.")
@click.option("--node-rank", type=click.IntRange(min=0), default=0, help="Which of them this is; 0 leads and serves.")
@click.option("--master-addr", default="127.0.0.1", help="Address of rank 0.")
@click.option("--master-port", type=click.IntRange(1, 65535), default=29_501, help="Port at which the ranks meet.")
def sim(
    port: int,
    models: tuple[str, ...],
    host: str,
    name: str,
    api_key: str,
    keepalive_s: float,
    prefill_tokens_per_second: float,
    decode_tokens_per_second: float,
    decode_slowdown: float,
    max_num_seqs: int,
    kv_blocks: int,
    block_tokens: int,
    prefix_cache_blocks: int,
    load_s: float,
    while_loading: str,
    fail_after: int | None,
    fail_mode: str,
    stall_after: int | None,
    cut_after: int | None,
    nnodes: int,
    node_rank: int,
    master_addr: str,
    master_port: int,
) -> int:
    """Run the built-in engine: vLLM's interface and timing, without a model.

    It answers "You said: ..." word by word, keeps honest time and memory, and misbehaves when asked: for every request
    by these flags, for one request by its `sim` field or `x-sim` header. A worker (--node-rank above 0) serves nothing.
    """
    if node_rank >= nnodes:
        raise click.UsageError(f"--node-rank {node_rank} is not below --nnodes {nnodes}.")
    settings = Settings(
        models=models,
        host=host,
        port=port,
        name=name,
        api_key=api_key,
        keepalive_s=keepalive_s,
        speeds=Speeds(prefill_tokens_per_second, decode_tokens_per_second, decode_slowdown),
        sizes=Sizes(max_num_seqs, kv_blocks, block_tokens, prefix_cache_blocks),
        ranks=Ranks(nnodes, node_rank, master_addr, master_port),
        misbehaviour=Misbehaviour(load_s, while_loading, fail_after, fail_mode, stall_after, cut_after),
    )
    try:
        ending = trio.run(run, settings, click.echo)
    except CannotListen as error:
        raise click.ClickException(str(error)) from None
    if ending.message:
        click.echo(f"appliance sim: {ending.message}", err=True)
    return ending.status
