"""The `xla` implementation on a CPU beside the PyTorch functions of Hugging Face transformers' Qwen3.5 module.

    python -m benchmarks.cpu_transformers --torch-python PATH [--threads 2] [--repeats 15]

`--torch-python` is the interpreter of an environment that has torch and transformers; both processes are bound to the
same cores and run alternately, never at the same time. Both get the same float32 inputs and are compared with each
other before they are timed. Writes `benchmarks/results/cpu.json`.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time

import numpy as np

RESULTS = pathlib.Path(__file__).parent / "results"
SHAPES = {  # case: (rows, tokens of a row)
    "cpu/prefill/f32/1x1024": (1, 1024),
    "cpu/decode/f32/B32": (32, 1),
}
NUM_KEY_HEADS, NUM_VALUE_HEADS, HEAD_DIM = 16, 32, 128


def make_inputs(rows, length):
    rng = np.random.default_rng(0)
    f = np.float32

    def normal(*shape):
        return rng.standard_normal(shape, f)

    return {
        "q": normal(rows, length, NUM_KEY_HEADS, HEAD_DIM),
        "k": normal(rows, length, NUM_KEY_HEADS, HEAD_DIM),
        "v": normal(rows, length, NUM_VALUE_HEADS, HEAD_DIM),
        "decay": rng.uniform(0.9, 1.0, (rows, length, NUM_VALUE_HEADS)).astype(f),
        "beta": rng.uniform(0.0, 1.0, (rows, length, NUM_VALUE_HEADS)).astype(f),
        "state": normal(rows, NUM_VALUE_HEADS, HEAD_DIM, HEAD_DIM) * f(0.1),
    }


def torch_worker(directory):
    """Answers each line on stdin, a case to run once, with seconds. Runs in the other environment."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]
    from transformers.models.qwen3_5 import modeling_qwen3_5 as module  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    group = NUM_VALUE_HEADS // NUM_KEY_HEADS
    functions = {}
    for case, (_, length) in SHAPES.items():
        x = {n: torch.from_numpy(a) for n, a in np.load(f"{directory}/{case.replace('/', '_')}.npz").items()}
        # The module repeats the key heads before it calls the function: not part of the time.
        q, k = (x[n].repeat_interleave(group, dim=2) for n in "qk")
        rule = module.torch_chunk_gated_delta_rule if length > 1 else module.torch_recurrent_gated_delta_rule
        functions[case] = lambda rule=rule, q=q, k=k, x=x: rule(
            q,
            k,
            x["v"],
            g=x["decay"].log(),
            beta=x["beta"],
            initial_state=x["state"],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
    print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__}), flush=True)
    with torch.inference_mode():
        for line in sys.stdin:
            case = line.strip()
            start = time.perf_counter()
            out, state = functions[case]()
            print(json.dumps(time.perf_counter() - start), flush=True)
            np.savez(f"{directory}/result.npz", out=out.numpy(), state=state.numpy())


def jax_function(rows, length, inputs):
    """One call on a donated pool, and the pool it starts from."""
    import jax
    import jax.numpy as jnp

    import gdn_jax

    tokens = rows * length
    qkv = jnp.asarray(np.concatenate([inputs[n].reshape(tokens, -1) for n in "qkv"], axis=1))
    decay, beta = (jnp.asarray(inputs[n].reshape(tokens, -1)) for n in ("decay", "beta"))
    slot_idx = jnp.arange(rows, dtype=jnp.int32)
    offsets = jnp.arange(rows + 1, dtype=jnp.int32) * length
    call = jax.jit(
        lambda state: gdn_jax.gated_delta_recurrence_fwd(
            qkv, decay, beta, state, slot_idx, offsets, implementation="xla"
        ),
        donate_argnums=0,
    )
    return call, lambda: jnp.asarray(inputs["state"])


def relative_error(x, ref):
    x, ref = np.asarray(x, np.float64), np.asarray(ref, np.float64)
    return float(np.linalg.norm(x.ravel() - ref.ravel()) / np.linalg.norm(ref))


def main():
    parser = argparse.ArgumentParser(description="xla on a CPU beside PyTorch.")
    parser.add_argument("--torch-python", required=True, help="interpreter of the environment with torch")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    # Before JAX starts its thread pool; the worker inherits it.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    import gdn_jax

    records = []
    with tempfile.TemporaryDirectory() as directory:
        inputs = {case: make_inputs(*shape) for case, shape in SHAPES.items()}
        for case, arrays in inputs.items():
            np.savez(f"{directory}/{case.replace('/', '_')}.npz", **arrays)
        worker = subprocess.Popen(
            [options.torch_python, __file__, "--worker", directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert worker.stdin is not None
        assert worker.stdout is not None
        versions = json.loads(worker.stdout.readline())
        for case, shape in SHAPES.items():
            call, fresh = jax_function(*shape, inputs[case])
            times = {"xla": [], "transformers": []}
            for repeat in range(options.repeats + 2):
                worker.stdin.write(case + "\n")
                worker.stdin.flush()
                times["transformers"].append(json.loads(worker.stdout.readline()))
                state = jax.block_until_ready(fresh())
                start = time.perf_counter()
                out, state = jax.block_until_ready(call(state))
                times["xla"].append(time.perf_counter() - start)
                if repeat == 0:
                    theirs = np.load(f"{directory}/result.npz")
                    error = max(relative_error(out, theirs["out"]), relative_error(state, theirs["state"]))
                    assert error < 1e-5, (case, error)
            for impl, seconds in times.items():
                seconds = seconds[2:]  # compilation and first touch
                records.append(
                    {
                        "case": case,
                        "impl": impl,
                        "median_us": float(np.median(seconds) * 1e6),
                        "min_us": float(np.min(seconds) * 1e6),
                        "rel_err_to_peer": error,
                    }
                )
                print(records[-1], flush=True)
        worker.stdin.close()
        worker.wait()

    result = {
        "device": f"{platform.machine()}, {cpu_name()}, {options.threads} threads",
        "versions": {"gdn_jax": gdn_jax.__version__, "jax": jax.__version__, **versions},
        "date": datetime.date.today().isoformat(),
        "command": f"python -m benchmarks.cpu_transformers --torch-python PATH --threads {options.threads}"
        f" --repeats {options.repeats}",
        "records": records,
    }
    (RESULTS / "cpu.json").write_text(json.dumps(result, indent=1) + "\n")


def cpu_name():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        torch_worker(sys.argv[2])
    else:
        main()
