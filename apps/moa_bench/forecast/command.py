"""``moa-bench forecast`` on the command line."""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

from moa_bench.forecast import present
from moa_bench.options import (
    add_bundle_option,
    add_command,
    add_question_options,
    add_target_options,
    bundle_of,
    check_at_least,
    questions_of,
)
from moa_bench.output import INTERRUPTED, add_output_options, check_output_options, finish
from moa_bench.output_file import check_output_file
from moa_bench.result import RESULT_VERSION, machine
from moa_runtime.errors import MoaError
from moa_runtime.optional_deps import require_extra

#: Session counts that a validation fits to.
_FIT_TO = "1,8"

_DESCRIPTION = """\
Forecast what a service for many users takes: GPUs, money, milliseconds a token and to the first token, when the server
streams, drafts itself, lets devices draft, or whoever is faster drafts (auto). A simulation of one verifier and its
clients: scheduler, prices of drafts and the choice of who drafts are the product's own code, what steps take and what
drafts bring was measured or published. --users asks for the forecast. The others say whether one may believe it:

  --measure TIMES    time the steps of this machine's verifier and device, and count the tokens of answers
  --validate RESULT  fit the simulation to some session counts of a moa-bench server --json, compare it at the others
  --check            the same for the published serving figures of a GPU; some two minutes of one processor
  --record DRAFTS    what drafts of each shape bring, from a --recording of moa-bench shapes

What is assumed is in the output, and with its sources in docs/forecast.md.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_command(commands, "forecast", "GPUs and money for many users, by who drafts", _DESCRIPTION, run)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--users", type=float, metavar="N", help="that use the service in a day (default 1000000)")
    what.add_argument("--measure", type=Path, metavar="TIMES", help="write measured times to this file")
    what.add_argument("--validate", type=Path, metavar="RESULT", help="a result of moa-bench server --json")
    what.add_argument("--check", action="store_true", help="compare with the hardware's published serving figures")
    what.add_argument("--record", type=Path, metavar="DRAFTS", help="write what drafts bring to this file")
    parser.add_argument("--hardware", default="h100-fp8", metavar="NAME", help="of the verifiers (default %(default)s)")
    parser.add_argument(
        "--token-ms", type=float, default=20.0, metavar="MS", help="promise for 95 of 100 tokens (default %(default)g)"
    )
    parser.add_argument(
        "--first-ms",
        type=float,
        default=1000.0,
        metavar="MS",
        help="promise for 95 of 100 first tokens (default %(default)g)",
    )
    parser.add_argument("--spare", type=int, default=1, metavar="N", help="GPUs that may be lost (default %(default)s)")
    parser.add_argument("--times", type=Path, metavar="TIMES", help="what --measure wrote, for --validate")
    parser.add_argument("--fit-to", metavar="N,N", help=f"session counts that --validate fits to (default {_FIT_TO})")
    parser.add_argument("--drafts", type=Path, metavar="DRAFTS", help="what --record wrote (default: as shipped)")
    parser.add_argument("--recording", type=Path, metavar="FILE", help="of moa-bench shapes, for --record")
    parser.add_argument("--seed", type=int, default=0, help="of the simulation (default %(default)s)")
    add_question_options(parser, required=False)
    add_bundle_option(parser)
    add_target_options(parser)
    parser.add_argument(
        "--max-new-tokens", type=int, default=64, metavar="N", help="tokens of an answer at most (default %(default)s)"
    )
    add_output_options(parser)


def run(args: argparse.Namespace) -> int:
    """Simulate or measure, and print.

    Raises:
        MoaError: bad input.
    """
    check_output_options(args)
    check_at_least(args, spare=0, seed=0)
    for name in ("users", "token_ms", "first_ms"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise MoaError(f"--{name.replace('_', '-')} must be above 0, not {value:g}")
    if args.fit_to is not None and args.validate is None:
        raise MoaError("--fit-to is for --validate: leave it out")
    require_extra("bench", "moa-bench forecast")
    work = next((name for name in _WORK if getattr(args, name)), "users")
    began, problem = time.monotonic(), ""
    try:
        figures = _WORK[work](args)
    except KeyboardInterrupt:
        figures, problem = {}, INTERRUPTED
    result = {
        "benchmark": "forecast",
        "version": RESULT_VERSION,
        "partial": bool(problem),
        "problem": problem or None,
        **figures,
        "machine": machine(),
        "seconds": round(time.monotonic() - began, 1),
    }
    return finish(result, args, present)


def _forecast(args: argparse.Namespace) -> dict[str, Any]:
    from moa_bench.forecast.capacity import Promise
    from moa_bench.forecast.data import assumptions, demand, gpu, hardware
    from moa_bench.forecast.projection import SPARES, Case, Plan, cases_of, evenings, projection, simulated
    from moa_drafter.progress import Progress

    drafts, hardware_of = _drafts(args), gpu(args.hardware)
    asked = demand(drafts.tau(drafts.shapes[-1]))
    plan = Plan(
        hardware_of,
        hardware_of.times(asked.device_ms.base),
        asked,
        drafts,
        args.users or 1e6,
        Promise(args.token_ms, args.first_ms),
        args.spare,
        seed=args.seed,
    )
    with Progress(total=len(cases_of(asked)), desc="forecast: replicas", unit="case") as bar:
        loads = simulated(plan, bar.update)
    base = Case("auto", asked.tau.base, asked.device_ms.base)
    with Progress(total=len(SPARES), desc="forecast: evenings", unit="fleet") as bar:
        fleet = evenings(plan, base.mode, loads[base], bar.update)
    said = {"hardware": hardware()["assumptions"], "demand": assumptions()["assumptions"]}
    sources = {**hardware()["sources"], **assumptions()["sources"]}
    return {
        "projection": projection(plan, loads),
        "fleet": fleet,
        "assumptions": said,
        "sources": sources,
        "drafts": drafts.about,
    }


def _validate(args: argparse.Namespace) -> dict[str, Any]:
    from moa_bench.forecast.measure import Measured
    from moa_bench.forecast.validate import Observed, Validation
    from moa_drafter.progress import Progress

    if args.times is None:
        raise MoaError("--validate needs --times FILE, which moa-bench forecast --measure FILE writes on that machine")
    measured, observed = Measured.read(args.times), Observed.read(args.validate)
    fit_to = _counts(args.fit_to or _FIT_TO)
    validation = Validation(observed, measured.times, _drafts(args), measured.questions, fit_to)
    with Progress(total=validation.trials, desc="forecast: fit", unit="trial") as bar:
        factors = validation.fit(bar.update)
    return _told(validation, factors, fit_to)


def _check(args: argparse.Namespace) -> dict[str, Any]:
    from moa_bench.forecast.answers import Question
    from moa_bench.forecast.data import FIT_TO, demand, gpu
    from moa_bench.forecast.validate import Factors, Validation
    from moa_drafter.progress import Progress

    hardware_of, drafts = gpu(args.hardware), _drafts(args)
    times = hardware_of.times(demand(drafts.tau(drafts.shapes[-1])).device_ms.base)
    questions = [Question(hardware_of.prompt, hardware_of.serving.most_tokens)]
    total = sum(sessions for sessions, _ in hardware_of.serving.loads)  # what a load takes is in proportion to these
    with Progress(total=total, desc="forecast: check", unit="client") as bar:
        validation = Validation(hardware_of.serving, times, drafts, questions, FIT_TO, on_load=bar.update, repeats=1)
        return _told(validation, Factors(verdict_ms=1000 * times.verdict_s), list(FIT_TO))


def _told(validation: Any, factors: Any, fit_to: list[int]) -> dict[str, Any]:
    from dataclasses import asdict

    from moa_bench.forecast.validate import summary

    found = validation.compared(factors)
    return {
        "validation": {
            "fit_to": fit_to,
            "factors": asdict(factors),
            "fitted": summary(found, fitted=True),
            "not_fitted": summary(found, fitted=False),
            "loads": [each.as_dict() for each in found],
        }
    }


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    from dataclasses import asdict

    import torch

    from moa_bench.accept.written import write_answers
    from moa_bench.cpus import split_cpus
    from moa_bench.forecast.answers import Question
    from moa_bench.forecast.measure import TIMED, Measured, measured_times
    from moa_bench.inprocess import engine_of
    from moa_bench.questions import Question as Asked
    from moa_drafter.devices import fastest_dtype
    from moa_drafter.progress import Progress
    from moa_runtime.backends.load import load_backend
    from moa_runtime.tokenizer import ChatTokenizer
    from moa_server.drafting.torch_backend import TOP_K, PackedDeviceHalf

    check_at_least(args, max_new_tokens=1)
    asked = [Asked(each.id, each.task, each.turns[:1]) for each in questions_of(args)]
    check_output_file("measure", args)
    bundle = bundle_of(args)
    cpus = split_cpus()
    torch.set_num_threads(len(cpus[1]) if cpus else 1)  # as a verifier that a benchmark starts
    engine = engine_of(args)
    server = PackedDeviceHalf(engine.drafter, engine.target, fastest_dtype(engine.target.device.type), top_k=TOP_K)
    device = load_backend(bundle, threads=1)
    with Progress(total=TIMED, desc="forecast: steps", unit="step") as bar:
        times, errors = measured_times(engine, server.steps, device, bundle.manifest, bar.update)
    with Progress(total=len(asked), desc="forecast: answers", unit="answer") as bar:
        answers = write_answers(
            engine,
            asked,
            ChatTokenizer.from_bundle(bundle),
            max_new_tokens=args.max_new_tokens,
            on_answers=lambda written: bar.update(len(written)),
        )
    measured = Measured(times, errors, [Question(len(prompt), len(answer)) for prompt, answer in answers.items()])
    measured.write(args.measure, {"machine": machine()})
    return {"measured": {"times": asdict(times), "errors": errors, "questions": len(answers)}}


def _record(args: argparse.Namespace) -> dict[str, Any]:
    from moa_bench.forecast.recorded import drafts_of
    from moa_bench.shapes.recording import Recording
    from moa_drafter.progress import Progress
    from moa_runtime.tokenizer import ChatTokenizer

    if args.recording is None:
        raise MoaError("--record needs --recording FILE, which moa-bench shapes --recording FILE makes")
    check_output_file("record", args)
    recording = Recording.read(args.recording)
    asked: dict[tuple[int, ...], str] = {}
    if args.questions is not None:
        tokenizer = ChatTokenizer.from_bundle(bundle_of(args))
        for question in questions_of(args):
            prompt = tokenizer.encode_chat([{"role": "user", "content": question.turns[0]}])
            asked[tuple(prompt)] = question.task
    with Progress(total=len(recording.answers), desc="forecast: drafts", unit="answer") as bar:
        drafts = drafts_of(recording, asked, bar.update)
    try:
        args.record.write_text(json.dumps(drafts.as_dict()) + "\n")
    except OSError as error:
        raise MoaError(f"cannot write {args.record}: {error.strerror}") from error
    return {"drafts": present.drafts_as_dict(drafts)}


_WORK = {"measure": _measure, "validate": _validate, "check": _check, "record": _record, "users": _forecast}


def _drafts(args: argparse.Namespace) -> Any:
    from moa_bench.forecast.drafts import MEASURED, Drafts

    return Drafts.read(args.drafts or MEASURED)


def _counts(text: str) -> list[int]:
    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise MoaError(
            f"--fit-to must be session counts with commas between them, such as 1,8, not {text!r}"
        ) from error
