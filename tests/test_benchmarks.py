"""The benchmark harness, without a GPU: what is measured, how times and errors are computed, the README's tables."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import cases, checks, many_devices, own, tables, timing
from benchmarks.__main__ import main
from benchmarks.peers import fla, jla
from benchmarks.peers import max as modular_max
from benchmarks.records import ResultFile, parse
from tests import oracle

REQUIRED = {
    *(f"decode/{dtype}/B{batch}" for dtype in ("f32", "bf16") for batch in (1, 8, 32, 128, 256)),
    *(f"decode/{dtype}/L8/B32" for dtype in ("f32", "bf16")),
    *(f"verify4/{dtype}/B{batch}" for dtype in ("f32", "bf16") for batch in (8, 32, 64)),
    *(f"fold4/{dtype}/L8/B64" for dtype in ("f32", "bf16")),
    *("conv/T8192", "conv/B128", "recurrent/f32/1x8192", "recurrent/f32/8x1024"),
    *(f"prefill/bf16/nv32/{rows}" for rows in ("1x512", "1x2048", "1x8192", "1x32768", "8x1024", "4x8192", "64x128")),
    *("prefill/bf16/nv48/1x8192", "prefill/bf16/nv8/1x32768", "prefill/f32/nv32/1x8192"),
}


def test_the_cases_are_those_of_the_results():
    names = [case.name for case in cases.CASES]
    assert len(names) == len(set(names))
    assert set(names) >= REQUIRED
    assert {*cases.FIRST_CALLS, *fla.NAMES, *jla.NAMES, *modular_max.NAMES} <= set(names)
    with pytest.raises(ValueError, match="nonsense"):
        cases.select(["decode", "nonsense"])
    assert [case.name for case in cases.select(["conv/"])] == ["conv/T8192", "conv/B128"]


def test_max_gets_what_its_graphs_are_built_for():
    for case in cases.CASES:
        if case.name not in modular_max.NAMES:
            continue
        assert case.heads == modular_max.LAYER
        small = case.tiny()
        inputs = cases.make_inputs(small)
        operands = modular_max.arrays(small, inputs)
        assert tuple(operands) == modular_max.OPERANDS[case.operation]
        assert operands["pool"] is inputs.pool
        assert {str(x.dtype) for name, x in operands.items() if name != "pool"} <= {"float32", "uint32"}
        if "ring" in operands:
            records = operands["ring"][..., : small.heads.record_elements]
            np.testing.assert_array_equal(records, inputs.ring)
            assert operands["ring"].shape[-1] == modular_max.RECORD_STRIDE


def test_work_counts_each_byte_once():
    by_name = {case.name: case for case in cases.CASES}
    decode = cases.work(by_name["decode/f32/B128"])
    assert decode.state_bytes == 2 * 128 * 32 * 128 * 128 * 4
    assert decode.bytes == decode.state_bytes + 128 * (2 * (8192 + 4096) + 8 * 32)
    layers, layer = (cases.work(by_name[name]) for name in ("decode/f32/L8/B32", "decode/f32/B32"))
    assert (layers.bytes, layers.vector_flops) == (8 * layer.bytes, 8 * layer.vector_flops)
    # A verify reads the states and leaves them; a fold reads and writes them and reads the records.
    verify, fold = (cases.work(by_name[name]) for name in ("verify4/f32/B64", "fold4/f32/L8/B64"))
    assert verify.state_bytes * 16 == fold.state_bytes
    assert fold.bytes - fold.state_bytes == 8 * 64 * 4 * 16 * 386 * 4
    # The floor is that of whichever is scarcer.
    assert decode.floor_us(4000.0, 700.0, "NVIDIA H200") == pytest.approx(decode.bytes / 4000.0 * 1e-3)
    chunked = cases.work(by_name["prefill/bf16/nv32/1x32768"])
    assert chunked.floor_us(4000.0, 10.0, "cpu") == pytest.approx(chunked.tensor_flops / 10.0 * 1e-6)


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_programs_can_be_prepared_before_the_inputs_exist(case):
    shapes = own.shapes_of(case.tiny())
    inputs = cases.make_inputs(case.tiny())
    for field in dataclasses.fields(inputs):
        value = getattr(inputs, field.name)
        if value is not None:
            assert (value.shape, value.dtype) == (
                getattr(shapes, field.name).shape,
                getattr(shapes, field.name).dtype,
            ), field.name
    assert np.isnan(oracle.exact(inputs.pool[inputs.spare_slots])).all()
    assert not np.isnan(oracle.exact(np.delete(inputs.pool, inputs.spare_slots, axis=0))).any()


def test_slope_is_the_median_of_pairs():
    # 100 calls more take 2 ms more, whatever both runs have in common; one disturbed pair does not count.
    short, long = [0.010, 0.011, 0.010, 0.012, 0.010], [0.012, 0.013, 0.012, 0.014, 0.090]
    median, spread = timing.slope_us(short, long, 100)
    assert median == pytest.approx(20.0)
    assert spread >= 0
    assert timing.slope_us([0.0], [1e-3], 10) == (pytest.approx(100.0), 0.0)


@pytest.mark.parametrize("expected_us", [0.1, 2.5, 40.0, 300.0, 5000.0, 1e6])
def test_plans_are_long_enough_to_measure(expected_us):
    plan = timing.plan_for(expected_us)
    assert 1 <= plan.short < plan.long
    assert 1 <= plan.unroll <= 32
    assert plan.extra_calls * max(expected_us, 2.0) >= 4000
    assert timing.plan_for(expected_us, max_unroll=4).unroll <= 4


def test_loop_programs_make_the_calls_they_say():
    def step(args, state):
        return (state[0] + args,), state[0]

    plan = timing.Plan(unroll=3, short=2, long=5)
    program, one = timing.loop_program(step, plan), jnp.float32(1)

    def carry():
        return timing.loop_carry(step, plan, one, (jnp.float32(0),))

    for which, calls in ((timing.ONCE, 1), (timing.SHORT, 6), (timing.LONG, 15)):
        (state,), outs = program(jnp.int32(which), one, carry())
        assert state == calls
        assert outs[-1] == calls - 1
    median, spread, _ = timing.time_program(program, one, carry(), plan, budget_s=0.0)
    assert np.isfinite([median, spread]).all()


@pytest.mark.parametrize(
    ("operation", "lengths", "num_layers"),
    [
        ("recurrence", (3, 1, 2), 1),
        ("recurrence", (20, 9), 1),
        ("recurrence", (1, 1), 3),
        ("verify_ring", (3, 3), 1),
        ("verify_ring", (8, 8), 1),
        ("state_fold", (3, 1, 2), 1),
        ("conv1d", (20, 1), 1),
    ],
)
def test_the_check_finds_one_wrong_number(operation, lengths, num_layers):
    heads = cases.HEADS["small"]
    case = cases.Case("test", operation, heads, lengths, "float32", num_layers=num_layers, implementation="xla")
    inputs = cases.make_inputs(case)
    call = own.make_call(case, inputs)
    state, out = jax.jit(call.step)(call.args, call.state)
    state, outs = [np.array(x) for x in state], [np.asarray(x) for x in jax.tree.leaves(out)]
    out = np.concatenate(outs) if outs else np.empty((0, 0))

    def errors():
        return checks.sampled(
            case,
            inputs,
            checks.Results(
                tokens=lambda tokens, channels: out[tokens, channels],
                state=lambda slot: state[0][slot],
                ring_row=(lambda row: state[1][row]) if operation == "verify_ring" else None,
            ),
        )()

    outputs_error, states_error = errors()
    assert outputs_error <= 2e-6
    assert states_error <= 2e-6
    # Of every layer, where there are several.
    layers = inputs.slot_idx[None] if inputs.row_ids is None else inputs.row_ids
    for layer, slots in enumerate(layers):
        before = state[0].copy()
        state[0][slots[0]].flat[0] += 1.0
        assert errors()[1] > 1e-3
        state[0][:] = before
        if operation != "state_fold":
            token = layer * case.num_tokens
            held, out[token, 0] = out[token, 0], np.nan
            assert np.isnan(errors()[0])
            out[token, 0] = held


def test_outputs_that_were_not_written_are_found():
    out = np.random.default_rng(0).standard_normal((4, 6)).astype(cases.FLOAT_DTYPES["bfloat16"])
    checks.assert_written(out, 3)
    for value in (np.nan, np.inf):
        bad = out.copy()
        bad[2, 1] = value
        with pytest.raises(AssertionError, match="finite"):
            checks.assert_written(bad, 3)
    bad = out.copy()
    bad[3, 2:4] = -0.0
    with pytest.raises(AssertionError, match="written"):
        checks.assert_written(bad, 3)


def record(case, impl="gdn_jax", time_us: float | None = 10.0, **fields):
    facts = {"bytes": 33_600_000, "state_bytes": 16_800_000, "operations_us": 7.0, "floor_us": 8.0, "rel_err": 1e-3}
    return {"case": case, "impl": impl, "median_us": time_us, **facts, "run": 0, **fields}


def test_result_files_merge(tmp_path):
    path = tmp_path / "h200.json"
    head = {"device": "NVIDIA H200", "versions": {"jax": "1"}, "copy_gbps": 4200.0}
    first = ResultFile(path, "first", merge=False)
    first.environment("gdn_jax", {**head, "matmul_tflops": 700.0})
    first.record(record("decode/f32/B1"))
    first.skipped({"case": "decode/f32/B8", "impl": "gdn_jax", "reason": "time budget"})
    peer = ResultFile(path, "second", merge=True)
    peer.environment("fla", {**head, "versions": {"torch": "2"}, "copy_gbps": 4100.0})
    peer.record(record("decode/f32/B1", "fla", 20.0))
    peer.record(record("decode/f32/B1", "fla", 21.0))
    content = json.loads(path.read_text())
    assert content["command"] == "first"
    assert content["copy_gbps"] == 4200.0
    assert content["versions"] == {"jax": "1", "torch": "2"}
    found = [(x["impl"], x["median_us"], x["run"]) for x in content["records"]]
    assert found == [("gdn_jax", 10.0, 0), ("fla", 21.0, 1)]
    assert len(content["skipped"]) == 1
    again = ResultFile(path, "third", merge=True)
    again.environment("gdn_jax", head)
    again.skipped({"case": "decode/f32/B32", "impl": "gdn_jax", "reason": "time budget"})
    content = json.loads(path.read_text())
    assert [run["command"] for run in content["runs"]] == ["first", "second"]
    assert len(content["skipped"]) == 2
    again.record(record("decode/f32/B8"))
    content = json.loads(path.read_text())
    assert [run["command"] for run in content["runs"]] == ["first", "second", "third"]
    assert content["command"] == "first"
    assert [x["case"] for x in content["skipped"]] == ["decode/f32/B32"]
    again.skipped({"case": "decode/f32/B8", "impl": "gdn_jax", "reason": "what was measured stays"})
    assert len(json.loads(path.read_text())["skipped"]) == 1
    again.record(record("decode/f32/B1"))
    content = json.loads(path.read_text())
    assert [(x["case"], x["run"]) for x in content["records"] if x["impl"] == "gdn_jax"] == [
        ("decode/f32/B1", 2),
        ("decode/f32/B8", 2),
    ]
    assert content["command"] == "third"
    other = ResultFile(path, "fourth", merge=True)
    with pytest.raises(ValueError, match="NVIDIA H200"):
        other.environment("gdn_jax", {**head, "device": "NVIDIA H100"})


def test_shares_are_of_the_median_of_all_copies(tmp_path):
    path = tmp_path / "h200.json"
    head = {"device": "NVIDIA H200", "versions": {}}
    peer = ResultFile(path, "first", merge=False)
    peer.environment("fla", {**head, "copy_gbps": 4000.0})
    peer.record(record("decode/f32/B1", "fla", 16.8))
    results = ResultFile(path, "second", merge=True)
    results.environment("gdn_jax", {**head, "copy_gbps": 4800.0})
    # What is known until then, and at the end.
    assert results.record(record("decode/f32/B1", time_us=10.0))["share_of_copy"] == 0.7
    results.record(record("decode/f32/B8", time_us=None, failed="wrong"))
    results.record(record("decode/f32/B32", time_us=10.0, operations_us=9.0))
    for copy_gbps in (4200.0, 4100.0):
        results.copy({"copy_gbps": copy_gbps})
    content = json.loads(path.read_text())
    assert (content["copy_gbps"], content["copy_spread_gbps"]) == (4200.0, 700.0)
    assert content["runs"][1]["copy_samples_gbps"] == [4800.0, 4200.0, 4100.0]
    by_case = {(x["case"], x["impl"]): x for x in content["records"]}
    assert by_case["decode/f32/B1", "gdn_jax"]["share_of_copy"] == 0.8
    assert by_case["decode/f32/B1", "gdn_jax"]["state_share_of_copy"] == 0.4
    assert by_case["decode/f32/B1", "gdn_jax"]["floor_us"] == 8.0
    assert by_case["decode/f32/B32", "gdn_jax"]["floor_us"] == 9.0
    assert "share_of_copy" not in by_case["decode/f32/B8", "gdn_jax"]
    assert by_case["decode/f32/B1", "fla"]["share_of_copy"] == 0.5
    assert "(4200 GB/s, of 4100 to 4800)" in tables.TABLES["environment"](tables.Results(content))


def results():
    share = {"share_of_copy": 0.9, "state_share_of_copy": 0.93}
    return {
        "device": "NVIDIA H200",
        "versions": {"jax": "0.11.2"},
        "date": "2026-01-01",
        "copy_gbps": 4200.0,
        "runs": [{"impl": "gdn_jax", "command": "python -m benchmarks", "copy_gbps": 4200.0}],
        "records": [
            record("decode/f32/B1", "gdn_jax", 2.4567, first_call_s=1.25, **share),
            record("decode/f32/B1", "fla", 3.3),
            record("decode/f32/B8", time_us=None, failed="wrong"),
            record("prefill/bf16/nv32/1x8192", "gdn_jax", 251.0, **share),
            *(record(f"crossover/B8/L{n}/{c}", time_us=3.0 * n) for n in (1, 64) for c in ("recurrent", "chunked")),
        ],
    }


def test_tables_show_what_was_measured():
    shown = tables.Results(results())
    decode = tables.TABLES["decode"](shown).splitlines()
    assert decode[0] == "| case | gdn_jax, us | floor, us | of copy | error | FLA, us |"
    assert decode[2] == "| `decode/f32/B1` | 2.46 | 8.00 | 93% | 1.0e-03 | 3.30 |"
    assert decode[3] == "| `decode/f32/B8` |  |  |  |  |  |"
    assert "| `prefill/bf16/nv32/1x8192` | 0.251 |" in tables.TABLES["prefill"](shown)
    assert "| 8 x 64 | 192 | 192 |  |" in tables.TABLES["crossover"](shown)
    assert "| `decode/f32/B1` | 1.2 |" in tables.TABLES["first-calls"](shown)
    assert "4200 GB/s" in tables.TABLES["environment"](shown)
    assert tables.TABLES["many-devices"](shown) == ""
    split = {"case": "tp2/decode/B128", "median_us": 150.0, "one_device_us": 300.0, "speed_up": 2.0}
    several = {**results(), "command": "python -m benchmarks.many_devices", "num_devices": 2}
    several["records"] = [{**split, "reduction_share": 0.125}]
    shown = tables.Results(results(), several)
    assert "| `tp2/decode/B128` | 150 | 300 | 2.00 | 12% |" in tables.TABLES["many-devices"](shown)
    for name, drawing in tables.plots(shown).items():
        assert drawing.startswith("<svg"), name
        assert drawing.count("<svg") == drawing.count("</svg>")


def test_the_readme_is_rewritten_and_checked(tmp_path):
    readme, source = tmp_path / "README.md", tmp_path / "h200.json"
    source.write_text(json.dumps(results()))
    readme.write_text("before\n<!-- benchmarks:begin decode -->\nold\n<!-- benchmarks:end decode -->\nafter\n")
    arguments = ["--readme", str(readme), "--results", str(source), "--docs", str(tmp_path / "docs")]
    assert tables.main([*arguments, "--check"]) == 1
    assert "old" in readme.read_text()
    assert tables.main(arguments) == 0
    text = readme.read_text()
    assert "old" not in text
    assert text.startswith("before\n<!-- benchmarks:begin decode -->\n")
    assert text.endswith("<!-- benchmarks:end decode -->\nafter\n")
    assert (tmp_path / "docs" / "prefill.svg").exists()
    assert tables.main([*arguments, "--check"]) == 0
    readme.write_text(
        text.replace("benchmarks:begin decode", "benchmarks:begin nothing").replace("end decode", "end nothing")
    )
    with pytest.raises(ValueError, match="nothing"):
        tables.main([*arguments, "--check"])


def test_one_command_measures_and_writes(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    path = tmp_path / "out.json"
    assert main(["decode/f32/B1", "--dry-run", "--impl", "gdn_jax", "max", "--output", str(path)]) == 0
    content = json.loads(path.read_text())
    assert content["command"] == "python -m benchmarks decode/f32/B1 --dry-run --impl gdn_jax max"
    names = [x["case"] for x in content["records"]]
    assert names == ["decode/f32/B1", "decode/f32/B128"]
    for x in content["records"]:
        assert x["implementation"] == "xla"
        assert x["in_place"]
        assert x["rel_err"] <= 3e-3
        assert x["first_call_s"] > 0
    assert [x["impl"] for x in content["skipped"]] == ["max"]
    assert "skipped" in capfd.readouterr().out
    assert parse("an ordinary line") is None


def test_many_devices_are_measured_against_one(tmp_path, capsys):
    path = tmp_path / "out.json"
    assert many_devices.main(["--tiny", "--devices", "2", "--output", str(path)]) == 0
    content = json.loads(path.read_text())
    assert content["command"] == "python -m benchmarks.many_devices --tiny --devices 2"
    assert [x["case"] for x in content["records"]] == ["tp2/decode/B128", "tp2/prefill/1x8192"]
    for x in content["records"]:
        assert x["rel_err"] <= many_devices.BUDGET
        assert {"median_us", "one_device_us", "speed_up", "with_reduction_us", "without_reduction_us"} <= set(x)
    assert "tp2/decode/B128" in capsys.readouterr().out
