"""The whole life of a few requests on one Gated DeltaNet layer: `python -m gdn_jax [FILE ...]`.

Texts of several lengths become one ragged batch of bytes. They go through a layer of Qwen3.5's shape with fixed random
projections: prefill into slots of a larger pool, decode steps, then speculative rounds (verify, accept some, fold,
roll the convolution back), which must end in the very bits of a run that never speculated. The table at the end says
what served each stage, how fast, how far from float64, and whether the pool stayed in its buffer.
"""

import argparse
import importlib.metadata
import pathlib
import sys
import time
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

import gdn_jax

NUM_KEY_HEADS, NUM_VALUE_HEADS, HEAD_DIM, KERNEL_SIZE = 16, 32, 128, 4
HIDDEN = 256
CONV_DIM = (2 * NUM_KEY_HEADS + NUM_VALUE_HEADS) * HEAD_DIM
WINDOW = 4  # tokens of one speculative round
ROUNDS = 3
DECODE_STEPS = 8
SPARE_SLOTS = 5
ERROR_BUDGET = {"float32": 1e-3, "bfloat16": 6e-3, "float16": 6e-3}  # of the chunked form


@dataclass
class Layer:
    """Fixed random weights: bytes to hidden vectors, hidden vectors to fused rows and gates, and the convolution."""

    dtype: jnp.dtype
    weights: dict = field(init=False)

    def __post_init__(self):
        rng = np.random.default_rng(0)

        def normal(*shape, scale):
            return jnp.asarray(rng.standard_normal(shape) * scale, self.dtype)

        self.weights = {
            "embed": normal(256, HIDDEN, scale=1.0),
            "qkv": normal(HIDDEN, CONV_DIM, scale=HIDDEN**-0.5),
            "a": normal(HIDDEN, NUM_VALUE_HEADS, scale=HIDDEN**-0.5),
            "b": normal(HIDDEN, NUM_VALUE_HEADS, scale=HIDDEN**-0.5),
            "conv": normal(CONV_DIM, KERNEL_SIZE, scale=0.5),
            "A_log": jnp.log(jnp.asarray(rng.uniform(0.01, 0.1, NUM_VALUE_HEADS), jnp.float32)),
            "dt_bias": jnp.zeros((NUM_VALUE_HEADS,), jnp.float32),
        }

    def project(self, tokens):
        """Bytes `[..]` to fused rows `[.., conv_dim]` and the gates of every token."""
        x = self.weights["embed"][tokens]
        a, b = x @ self.weights["a"], x @ self.weights["b"]
        decay, beta = gdn_jax.gated_delta_gates(a, b, self.weights["A_log"], self.weights["dt_bias"])
        return x @ self.weights["qkv"], decay, beta


def forward(weight, rows, decay, beta, conv_state, state, slot_idx, offsets, has_initial_state=None, *, algorithm):
    """Both passes over a ragged batch. Returns the outputs, the convolved rows (for the oracle), and the pools."""
    qkv, conv_state = gdn_jax.gated_delta_conv1d_fwd(
        rows, weight, conv_state, slot_idx, offsets, activation="silu", has_initial_state=has_initial_state
    )
    out, state = gdn_jax.gated_delta_recurrence_fwd(
        qkv, decay, beta, state, slot_idx, offsets, has_initial_state=has_initial_state, algorithm=algorithm
    )
    return out, qkv, conv_state, state


def verify(weight, rows, decay, beta, conv_state, state, ring, slot_idx, offsets):
    """Both passes over draft tokens: outputs and records, and pools that are left as they were."""
    qkv, conv_state = gdn_jax.gated_delta_conv1d_fwd(
        rows, weight, conv_state, slot_idx, offsets, activation="silu", write_state=False
    )
    ring_slots = jnp.arange(slot_idx.shape[0], dtype=jnp.int32)
    out, ring, state = gdn_jax.gated_delta_recurrence_verify_ring(
        qkv, decay, beta, state, ring, slot_idx, ring_slots, offsets
    )
    return out, conv_state, state, ring


def commit(weight, rows, conv_state, state, ring, slot_idx, accepted):
    """Fold the accepted records and replay the convolution over the accepted tokens."""
    batch = slot_idx.shape[0]
    ring_rows = jnp.arange(batch, dtype=jnp.int32)
    state = gdn_jax.gated_delta_state_fold(state, ring, slot_idx[None], ring_rows[None], accepted)
    # Row 2b holds request b's accepted tokens, row 2b + 1 its rejected ones, which belong to no slot.
    starts = jnp.arange(batch, dtype=jnp.int32) * WINDOW
    offsets = jnp.append(jnp.stack([starts, starts + accepted], 1).reshape(-1), batch * WINDOW)
    slots = jnp.stack([slot_idx, jnp.full_like(slot_idx, -1)], 1).reshape(-1)
    _, conv_state = gdn_jax.gated_delta_conv1d_fwd(rows, weight, conv_state, slots, offsets)
    return conv_state, state


def float64_oracle(qkv, decay, beta, state, offsets, progress):
    """The rule token by token in NumPy float64: outputs `[T, nv * VD]`. Advances state `[B, nv, KD, VD]` in place."""
    group = NUM_VALUE_HEADS // NUM_KEY_HEADS
    key_dim = NUM_KEY_HEADS * HEAD_DIM
    qkv, decay, beta = (np.asarray(x.astype(jnp.float32), np.float64) for x in (qkv, decay, beta))
    q, k, v = (x.reshape(len(qkv), -1, HEAD_DIM) for x in np.split(qkv, (key_dim, 2 * key_dim), axis=1))
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    q, k = np.repeat(q / np.sqrt(HEAD_DIM), group, axis=1), np.repeat(k, group, axis=1)
    out = np.zeros(v.shape)
    for b in range(len(offsets) - 1):
        S = state[b]
        for t in range(offsets[b], offsets[b + 1]):
            S *= decay[t][:, None, None]
            delta = beta[t][:, None] * (v[t] - np.matmul(k[t][:, None], S)[:, 0])
            S += k[t][:, :, None] * delta[:, None]
            out[t] = np.matmul(q[t][:, None], S)[:, 0]
            progress(t + 1, len(qkv))
    return out.reshape(len(qkv), -1)


def relative_error(x, ref) -> float:
    return float(np.linalg.norm(np.asarray(x.astype(jnp.float32), np.float64) - ref) / np.linalg.norm(ref))


def same_bits(x, y) -> bool:
    return np.asarray(x).tobytes() == np.asarray(y).tobytes()


def progress_bar(label):
    """A callback that redraws one line of a terminal, and stays silent elsewhere."""
    last = [time.monotonic()]

    def show(done, total):
        if sys.stderr.isatty() and (done == total or time.monotonic() - last[0] > 0.2):
            last[0] = time.monotonic()
            end = "\n" if done == total else ""
            print(f"\r  {label}: {done} of {total} tokens", end=end, file=sys.stderr, flush=True)

    return show


def paragraphs(files, longest, total):
    """The paragraphs of the files, or of this project's README, as bytes; cut to `longest` each and `total` in all."""
    if files:
        text = "\n\n".join(pathlib.Path(f).read_text(encoding="utf-8", errors="replace") for f in files)
    else:
        text = importlib.metadata.metadata("gdn-jax")["Description"]
    prompts = [p.strip().encode()[:longest] for p in text.split("\n\n") if p.strip()]
    kept, tokens = [], 0
    for prompt in prompts:
        if tokens + len(prompt) <= total:
            kept.append(np.frombuffer(prompt, np.uint8).astype(np.int32))
            tokens += len(prompt)
    return kept, len(prompts)


class Report:
    """The stages of the run, and the check that a pool is still the buffer it was."""

    header = ("stage", "implementation", "tokens", "ms", "tokens/s", "rel. error", "bit-exact", "in place")

    def __init__(self, budget: float):
        self.rows = []
        self.failed = False
        self._budget = budget

    def add(self, stage, implementation, tokens, seconds, error=None, exact=None, in_place=None):
        yes_no = {None: "", True: "yes", False: "NO"}
        self.failed |= False in (exact, in_place) or (error is not None and not error <= self._budget)
        self.rows.append(
            (
                stage,
                implementation,
                str(tokens),
                f"{seconds * 1e3:.1f}",
                f"{tokens / seconds:.0f}",
                "" if error is None else f"{error:.1e}",
                yes_no[exact],
                yes_no[in_place],
            )
        )

    def print(self):
        rows = [self.header, *self.rows]
        widths = [max(len(r[i]) for r in rows) for i in range(len(self.header))]
        print()
        for r in rows:
            print(
                "  ".join(x.ljust(w) if i < 2 else x.rjust(w) for i, (x, w) in enumerate(zip(r, widths, strict=True)))
            )


def compiled(function, *args, donate, **static):
    """`function` compiled for these arguments, with the arguments named in `donate` given away."""
    jitted = jax.jit(lambda *a: function(*a, **static), donate_argnums=donate)
    return jitted.lower(*args).compile()


def timed(function, *args):
    start = time.perf_counter()
    out = jax.block_until_ready(function(*args))
    return out, time.perf_counter() - start


def buffers(*pools):
    return [p.unsafe_buffer_pointer() for p in pools]


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m gdn_jax", description="The life of a few requests on one Gated DeltaNet layer."
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help="texts; default: this project's README")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"), help="of the tokens")
    parser.add_argument("--longest", type=int, default=300, help="bytes of a paragraph that are used")
    parser.add_argument("--total", type=int, default=1200, help="bytes that are used in all")
    options = parser.parse_args(argv)

    prompts, found = paragraphs(options.files, options.longest, options.total)
    if not prompts or options.longest < 1:
        parser.error("no text to work on: every FILE is empty, or --longest and --total leave nothing of it")
    lengths = [len(p) for p in prompts]
    batch = len(prompts)
    device = jax.devices()[0]
    print(f"jax {jax.__version__} on {device.device_kind} ({device.platform}); tokens in {options.dtype}")
    print(f"{batch} of {found} paragraphs, {sum(lengths)} bytes, {min(lengths)} to {max(lengths)} each")
    print(
        f"layer: {NUM_KEY_HEADS} key heads, {NUM_VALUE_HEADS} value heads, {HEAD_DIM} x {HEAD_DIM}, "
        f"convolution over {KERNEL_SIZE}; pool of {batch + SPARE_SLOTS} slots"
    )

    layer, report = Layer(jnp.dtype(options.dtype)), Report(ERROR_BUDGET[options.dtype])
    weight = layer.weights["conv"]
    project = jax.jit(layer.project)
    max_slots = batch + SPARE_SLOTS
    slots_host = np.random.default_rng(1).permutation(max_slots)[:batch].astype(np.int32)
    slot_idx = jnp.asarray(slots_host)
    spare = np.setdiff1d(np.arange(max_slots), slots_host)
    # What the pools hold at first must not matter to fresh requests, and must survive in the slots of nobody.
    conv_state = jnp.full((max_slots, CONV_DIM, KERNEL_SIZE - 1), 7.0, layer.dtype)
    state = jnp.full((max_slots, NUM_VALUE_HEADS, HEAD_DIM, HEAD_DIM), 7.0, jnp.float32)

    # Prefill.
    offsets_host = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    rows, decay, beta = project(jnp.asarray(np.concatenate(prompts)))
    fresh = jnp.zeros((batch,), bool)
    args = (weight, rows, decay, beta, conv_state, state, slot_idx, jnp.asarray(offsets_host), fresh)
    print("prefill: compiling", flush=True)
    prefill = compiled(forward, *args, donate=(4, 5), algorithm="auto")
    before = buffers(conv_state, state)
    (out, qkv, conv_state, state), seconds = timed(prefill, *args)
    in_place = buffers(conv_state, state) == before
    oracle_state = np.zeros((batch, NUM_VALUE_HEADS, HEAD_DIM, HEAD_DIM))
    progress = progress_bar("float64 oracle of the prefill")
    oracle_out = float64_oracle(qkv, decay, beta, oracle_state, offsets_host, progress)
    error = max(relative_error(out, oracle_out), relative_error(state[slot_idx], oracle_state))
    untouched = bool((state[spare] == 7.0).all() & (conv_state[spare] == 7.0).all())
    report.add("prefill", served_by(prefill), sum(lengths), seconds, error, in_place=in_place and untouched)

    # What follows each text is its own beginning, projected once: a matrix product of another size rounds differently.
    continuation = np.stack([np.resize(p, DECODE_STEPS + ROUNDS * WINDOW) for p in prompts])
    projected = [np.asarray(x) for x in project(jnp.asarray(continuation))]

    def take(position, count):
        """`count` tokens of each request from its `position` on, as ragged rows."""
        index = np.asarray(position)[:, None] + np.arange(count)
        return [jnp.asarray(np.concatenate([x[b, index[b]] for b in range(batch)])) for x in projected]

    one_each = jnp.arange(batch + 1, dtype=jnp.int32)
    position = np.zeros(batch, np.int64)
    print(f"decode: compiling, then {DECODE_STEPS} steps", flush=True)
    args = (weight, *take(position, 1), conv_state, state, slot_idx, one_each)
    decode = compiled(forward, *args, donate=(4, 5), algorithm="recurrent")
    before, seconds, worst = buffers(conv_state, state), 0.0, 0.0
    for _ in range(DECODE_STEPS):
        token = take(position, 1)
        (out, qkv, conv_state, state), s = timed(decode, weight, *token, conv_state, state, slot_idx, one_each)
        _, decay, beta = token
        oracle_out = float64_oracle(qkv, decay, beta, oracle_state, np.arange(batch + 1), lambda *_: None)
        seconds, worst = seconds + s, max(worst, relative_error(out, oracle_out))
        position += 1
    worst = max(worst, relative_error(state[slot_idx], oracle_state))
    in_place = buffers(conv_state, state) == before
    report.add("decode", served_by(decode), batch * DECODE_STEPS, seconds, worst, in_place=in_place)

    # Speculation, against the same tokens decoded one by one.
    print(f"speculation: compiling, then {ROUNDS} rounds of {WINDOW} drafts a request", flush=True)
    plain_conv, plain_state = conv_state + 0, state + 0
    stride = gdn_jax.gated_delta_ring_record_elements(HEAD_DIM, HEAD_DIM, NUM_VALUE_HEADS // NUM_KEY_HEADS)
    ring = jnp.full((batch, NUM_KEY_HEADS, WINDOW, stride), jnp.nan, jnp.float32)
    windows = one_each * WINDOW
    drafts = take(position, WINDOW)
    run_verify = compiled(verify, weight, *drafts, conv_state, state, ring, slot_idx, windows, donate=(4, 5, 6))
    accepted = jnp.zeros((batch,), jnp.int32)
    run_commit = compiled(commit, weight, drafts[0], conv_state, state, ring, slot_idx, accepted, donate=(2, 3))
    before = buffers(conv_state, state, ring)
    verify_seconds = commit_seconds = 0.0
    folded, exact_outputs = 0, True
    rng = np.random.default_rng(2)
    for _ in range(ROUNDS):
        accept = rng.integers(0, WINDOW + 1, batch)
        accept[:2] = (0, WINDOW)[: min(batch, 2)]
        drafts = take(position, WINDOW)
        args = (weight, *drafts, conv_state, state, ring, slot_idx, windows)
        (out, conv_state, state, ring), s = timed(run_verify, *args)
        verify_seconds += s
        args = (weight, drafts[0], conv_state, state, ring, slot_idx, jnp.asarray(accept, jnp.int32))
        (conv_state, state), s = timed(run_commit, *args)
        commit_seconds += s
        folded += int(accept.sum())
        out = np.asarray(out).reshape(batch, WINDOW, -1)
        for step in range(WINDOW):
            going = jnp.asarray(np.where(step < accept, slots_host, -1))
            token = take(np.minimum(position + step, continuation.shape[1] - 1), 1)
            plain_out, _, plain_conv, plain_state = decode(weight, *token, plain_conv, plain_state, going, one_each)
            exact_outputs &= same_bits(np.asarray(plain_out)[step < accept], out[step < accept, step])
        position += accept
    in_place = buffers(conv_state, state, ring) == before
    report.add(
        "verify", served_by(run_verify), batch * WINDOW * ROUNDS, verify_seconds, exact=exact_outputs, in_place=in_place
    )
    exact = same_bits(state, plain_state) and same_bits(conv_state, plain_conv)
    report.add("fold and replay", served_by(run_commit), max(folded, 1), commit_seconds, exact=exact, in_place=in_place)
    report.print()
    print("\nbit-exact: outputs, states and windows against the run that never speculated")
    return 1 if report.failed else 0


def served_by(program) -> str:
    """Which implementation automatic choice took, read off the compiled program."""
    text = program.as_text()
    return next((name for name in ("mosaic_gpu", "triton") if name in text), "xla")


if __name__ == "__main__":
    raise SystemExit(main())
