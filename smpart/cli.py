"""The command line. Every command takes ``--json``: stdout's last line is then one JSON object; logs go to stderr.

Exit codes: 0 done, 1 failed, 2 bad usage or input, 130 interrupted, 143 terminated. What a command needs is
imported when it runs.
"""

from __future__ import annotations

import logging
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from smpart.bench.stdout import print_json, stdout
from smpart.errors import SmpartError, UsageError


class _Commands(typer.core.TyperGroup):
    """Turns smpart's errors into one line on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SmpartError as error:
            typer.echo(f"smpart: {error}", err=True)
            raise typer.Exit(2 if isinstance(error, UsageError) else 1) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=_Commands,
    name="smpart",
    help="Prefill and decode of a language model at the same time, in two lanes of one device.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as stdout's last line.")]
Backend = Annotated[str, typer.Option(help="auto, green, mps, cores, or sim:<gpu> (in virtual time).")]
Profile = Annotated[str, typer.Option(help="auto, none, or the folder or file of a profile that must match.")]
Dtype = Annotated[str, typer.Option(help="Element type of weights and KV; auto: float32, on simulated GPUs bfloat16.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of arrivals, prompts and sampling.")]


def main() -> None:
    """The entry point of ``smpart``."""
    signal.signal(signal.SIGTERM, _leave)
    with stdout("smpart"):
        app()


def _leave(number: int, frame: FrameType | None) -> None:
    """End as on Ctrl-C, so that everything that was started is ended too."""
    raise SystemExit(128 + number)


def _show_version(wanted: bool) -> None:
    if wanted:
        from smpart import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _begin(
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Log what is chosen automatically, and why.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("smpart").setLevel(level)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Devices, backends and why each is or isn't usable, realised splits, switch cost."""
    from smpart.bench.doctor import examine, require_realised
    from smpart.bench.doctor_lines import lines

    facts = examine()
    if as_json:
        print_json({"schema": 1, "command": "doctor", **facts})
    else:
        typer.echo("\n".join(lines(facts)))
    require_realised(facts)


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="Local path, hub id, smollm2, or random:<family>.")],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The prompt; - reads stdin.")],
    max_tokens: Annotated[int, typer.Option(help="Most tokens to produce.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus mass.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Reproduces a sampled text.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat/--raw", help="Write the prompt as a chat turn, or take it as it is.")
    ] = False,
    policy: Annotated[str, typer.Option(help="Scheduling policy.")] = "smpart",
    backend: Backend = "auto",
    dtype: Dtype = "auto",
    profile: Profile = "auto",
    as_json: Json = False,
) -> None:
    """Stream one answer."""
    from smpart.bench.answer import Question, answer
    from smpart.runtime.sampling import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    text = sys.stdin.read() if prompt == "-" else prompt
    stream = sys.stderr if as_json else sys.stdout

    def show(piece: str) -> None:
        stream.write(piece)
        stream.flush()

    result = answer(Question(model, text, params, chat, policy, backend, dtype, profile), show)
    show("\n")
    if as_json:
        print_json({"schema": 1, "command": "generate", **result})


@app.command()
def profile(
    model: Annotated[str, typer.Argument(help="Local path, hub id, smollm2, random:<family>; with sim also a shape.")],
    out: Annotated[Path, typer.Option(help="Profile folder, new or to go on with.")],
    backend: Backend = "auto",
    minutes: Annotated[float, typer.Option(help="Measuring time, over all runs into the folder.")] = 10.0,
    dtype: Dtype = "auto",
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of what is measured, and when.")] = None,
    max_prompt: Annotated[int | None, typer.Option(help="Most new tokens of a forward.")] = None,
    max_context: Annotated[int | None, typer.Option(help="Most tokens that one sequence attends to.")] = None,
    max_batch: Annotated[int | None, typer.Option(help="Most sequences that decode.")] = None,
    as_json: Json = False,
) -> None:
    """Measure a model on both lanes, alone and side by side, and fit what predicts it. Can be stopped and resumed."""
    from smpart.bench.console import Display
    from smpart.bench.fit import fit_folder
    from smpart.bench.fit_table import show
    from smpart.bench.profile import Options, measure
    from smpart.predictor.estimators.doubt import Doubt

    options = Options(model, out, minutes, backend, dtype, seed, max_prompt, max_context, max_batch)
    display = Display(as_json=as_json)
    result = measure(
        options, Doubt, lambda folder: fit_folder(folder, say=display.say).report, display.say, display.budget
    )
    show(result["fit"], display.tables, display.say)
    if as_json:
        print_json(result)


@app.command()
def fit(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a profile.")],
    as_json: Json = False,
) -> None:
    """Samples to artefact and error report: held-out errors, bounds, noise, and the published forms beside ours."""
    from smpart.bench.console import Display
    from smpart.bench.fit import fit_folder
    from smpart.bench.fit_table import show

    display = Display(as_json=as_json)
    made = fit_folder(folder, say=display.say).report
    show(made, display.tables, display.say)
    if as_json:
        print_json(made)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A profile or bench folder.")],
    out: Annotated[Path | None, typer.Option(help="File to write; DIR/report.html by default.")] = None,
    as_json: Json = False,
) -> None:
    """One self-contained HTML page from a profile or bench folder."""
    from smpart.bench.console import Display
    from smpart.bench.pages.make import write_report

    path = write_report(folder, out, Display(as_json=as_json).say)
    if as_json:
        print_json({"schema": 1, "command": "report", "page": str(path)})
    else:
        typer.echo(path)


@app.command()
def bench(
    policy: Annotated[str, typer.Option(help="Policies to compare, comma-separated.")] = "mixed,chunked,smpart",
    trace: Annotated[
        str,
        typer.Option(help="Mooncake .jsonl, Azure .csv, lengths .csv, or synth:chat|code|longdoc[:poisson|:bursty]."),
    ] = "synth:chat",
    model: Annotated[
        str, typer.Option(help="smollm2, random:<family>, a path or hub id; with sim also a built-in shape.")
    ] = "smollm2",
    backend: Backend = "auto",
    slo: Annotated[
        str | None,
        typer.Option(help="ttft=MS,tpot=MS,itl=MS (left out: 200, 50, twice TPOT); without it, fitted to the machine."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for JSON, Parquet, plots and the configuration.")] = None,
    rate: Annotated[
        str | None, typer.Option(help="Requests per second, or several, comma-separated; arrivals are rescaled.")
    ] = None,
    speedup: Annotated[float, typer.Option(help="Multiple of the load's own rate.")] = 1.0,
    limit: Annotated[int | None, typer.Option(help="First N requests (synthetic: how many).")] = None,
    scale: Annotated[float, typer.Option(help="Multiply all prompt and output lengths, for slow machines.")] = 1.0,
    clip: Annotated[
        bool, typer.Option("--clip", help="Cut requests that are too long instead of refusing them.")
    ] = False,
    time_unit: Annotated[str, typer.Option(help="What a trace's numeric times are in: auto, ms, s.")] = "auto",
    capacity: Annotated[bool, typer.Option("--capacity", help="Search for the highest rate that holds.")] = False,
    attainment: Annotated[
        str | None, typer.Option(help="Share of requests that must meet every objective at capacity: 0.9; or several.")
    ] = None,
    best_effort: Annotated[
        float, typer.Option(help="Share of requests that yield to all others; only those others are judged.")
    ] = 0.0,
    jobs: Annotated[int, typer.Option(help="Processes that share runs in virtual time; 0: one a core.")] = 0,
    seed: Seed = 0,
    repeat: Annotated[int, typer.Option(help="Replays of each policy, on seeds SEED, SEED+1, ...")] = 1,
    dtype: Dtype = "auto",
    profile: Profile = "auto",
    as_json: Json = False,
) -> None:
    """Replay a load under several policies, in real or virtual time, and compare."""
    from smpart.bench.bench import Bench, Options, numbers
    from smpart.bench.capacity import at_capacity
    from smpart.bench.console import Display
    from smpart.bench.crew import crew
    from smpart.bench.output import Output
    from smpart.bench.source import TraceOptions
    from smpart.engine.deployment import Deployment
    from smpart.scheduler.slo import SLO

    source = TraceOptions(trace, limit, scale, clip, time_unit, seed)
    policies = tuple(p.strip() for p in policy.split(","))
    objectives = None if slo is None else SLO.parse(slo)
    rates, shares = numbers("--rate", rate), numbers("--attainment", attainment)
    options = Options(policies, source, objectives, rates, speedup, repeat, capacity, shares, jobs, best_effort)
    options.check()
    display = Display(as_json=as_json)
    config = {"model": model, "backend": backend, "dtype": dtype, "profile": profile, "options": asdict(options)}
    output = Output("bench", as_json, out, config, display)
    output.check()
    with Deployment.open(model, backend=backend, dtype=dtype, profile=profile) as deployment:
        display.say(f"profile: {deployment.profile_words}")
        made = Bench(deployment, options, display.say, display.watch)
        with crew(made, display.say) as workers:
            runs = list(at_capacity(made, workers, display.say) if capacity else workers.runs(made.tasks()))
        title = f"{model} on {deployment.backend}, {Path(trace).name}"
        output.report(runs, deployment.device, deployment.gpus, title, profile=deployment.profile_facts)


@app.command()
def advise(
    model: Annotated[str, typer.Option(help="A built-in shape, a path or hub id of a configuration.")],
    gpu: Annotated[str, typer.Option(help="h100, h200, a100 or rtx4090; xN for N that share the model.")],
    trace: Annotated[str, typer.Option(help="As for `smpart bench`.")],
    slo: Annotated[str, typer.Option(help="ttft=MS,tpot=MS,itl=MS; left out: 200, 50, twice TPOT.")],
    export: Annotated[
        list[Path] | None, typer.Option(help="A .yaml for SGLang's pdmux, or a .json for others; may be repeated.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer requests and constants, one seed: a minute.")] = False,
    limit: Annotated[int | None, typer.Option(help="First N requests (synthetic: how many).")] = None,
    jobs: Annotated[int, typer.Option(help="Processes that share the runs; 0: one a core.")] = 0,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Split or not, which splits, the gain to expect, and why; from runs in virtual time. Exports what it learned."""
    from smpart.bench.advise.advise import advise as ask
    from smpart.bench.advise.answer import Answer
    from smpart.bench.advise.export import check
    from smpart.bench.advise.question import Question
    from smpart.bench.console import Display
    from smpart.scheduler.slo import SLO

    paths, display = export or [], Display(as_json=as_json)
    check(paths)
    question = Question.ask(model, gpu, trace, SLO.parse(slo), limit=limit, seed=seed, jobs=jobs, quick=quick)
    answer = Answer(ask(question, display.say, display.budget))
    display.tables.print(answer.table())
    for line in answer.lines():
        display.tables.print(line, markup=False, soft_wrap=True)
    try:
        exported = answer.export(paths, display.say)
    except SmpartError:
        if as_json:  # the answer is not lost with the file
            print_json({**answer.record(), "export": None})
        raise
    if as_json:
        print_json({**answer.record(), "export": exported})


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the picture, JSON and Parquet.")] = Path("out/demo"),
    model: Annotated[str, typer.Option(help="A real model with a chat template.")] = "smollm2",
    backend: Backend = "auto",
    dtype: Dtype = "auto",
    profile: Profile = "auto",
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """The main job: a real small model on two lanes, against mixed and chunked, with a table and a picture."""
    from smpart.bench.console import Display
    from smpart.bench.demo import Demo, verdict
    from smpart.bench.output import Output
    from smpart.engine.deployment import Deployment

    display = Display(as_json=as_json)
    config = {"model": model, "backend": backend, "dtype": dtype, "profile": profile, "seed": seed}
    output = Output("demo", as_json, out, config, display)
    output.check()
    display.say(f"loading {model}")
    with Deployment.open(model, backend=backend, dtype=dtype, profile=profile) as deployment:
        display.say(f"profile: {deployment.profile_words}")
        show = Demo(deployment, seed, display.say, display.watch)
        runs = []
        for run in show.runs():
            runs.append(run)
            display.say(f"{run.policy}: {len(run.replay.served)} requests in {run.replay.seconds:.0f} s")
        for question, text in show.answers(runs[-1]):
            display.say(f"> {question}\n  {text}")
        title, used = f"{model} on {deployment.backend}", deployment.profile_facts
        output.report(runs, deployment.device, deployment.gpus, title, verdict=verdict(runs), profile=used)
    display.say(verdict(runs))
