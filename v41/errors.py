"""Every way v41 refuses: one type a fact, each with what was found, where, and what to do."""

from __future__ import annotations


class V41Error(Exception):
    """What was found, where, what to do. `facts` fill the sentences; `where` is a model line, a file or an option."""

    found = fix = ""

    def __init__(self, where: object, **facts: object) -> None:
        self.where, self.facts = where, facts
        super().__init__(f"{self.found.format(**facts)}\n  at   {where}\n  fix  {self.fix.format(**facts)}")


class UnknownOption(V41Error):
    """facts: option, known (both as text)."""

    found = "v41 has no option {option!r}"
    fix = "use one of: {known}"


class InvalidOptionValue(V41Error):
    """facts: option, value (as it was given), allowed (as text)."""

    found = "option {option} cannot be {value!r}"
    fix = "use {allowed}"


class UnknownBuckets(V41Error):
    """facts: size, known (as text)."""

    found = "buckets are given for {size!r}, and the program has no such size"
    fix = "use one of: {known}"


class NoSuchDevice(V41Error):
    """facts: device, problem."""

    found = "device {device!r} cannot hold a model: {problem}"
    fix = "use cpu, or a device that this build of torch has and this machine holds"


class CodegenHasNoDevice(V41Error):
    """facts: codegen, reason, others (as text)."""

    found = "codegen {codegen} cannot run this graph: {reason}"
    fix = "use codegen {others} here, or move the model and its inputs to a GPU"


class ModeRefused(V41Error):
    """facts: mode, known."""

    found = "v41 has no modes, and was given mode={mode!r}"
    fix = "drop mode= and choose with options=: {known}"


class GradientsRequested(V41Error):
    """facts: count, total, first."""

    found = "{count} of {total} inputs require gradients; the first is {first}"
    fix = "call the model under torch.no_grad() or torch.inference_mode(): v41 compiles inference only"


class PieceInputMismatch(V41Error):
    """facts: found, expected."""

    found = "a compiled piece was given what it was not compiled for: {found}"
    fix = "the piece takes {expected}: hand it what the traced graph produces there, or compile it again"


class KernelDoesNotCompile(V41Error):
    """facts: kernel, arch, error."""

    found = "Triton kernel {kernel} does not compile for {arch}: {error}"
    fix = "the error names the line of the kernel; a generated kernel that fails is a bug of its generator"


class BodyNotKept(V41Error):
    """No facts."""

    found = "the ATen graph of a piece that came from the cache, or from text, was asked for, and is not kept there"
    fix = 'take the plan of a compilation with options={{"cache": False}}'


class TableNotHeld(V41Error):
    """facts: bytes, problem."""

    found = "a table of {bytes} bytes cannot be held so: {problem}"
    fix = "leave it mapped from its file, which takes little memory, or give the process more"


class StepNotCaptured(V41Error):
    """facts: rows."""

    found = "a step of {rows} rows did not become one graph, and only such steps have side streams"
    fix = "take a decode step of at most 256 rows; the report's captures say why another did not"


class BenchNeedsGPU(V41Error):
    """facts: found."""

    found = "a benchmark measures a GPU, and {found}"
    fix = "run it where torch.cuda.is_available() is true"


class BenchNeedsRanks(V41Error):
    """facts: found."""

    found = "a benchmark measures a model that several ranks share, and found {found}"
    fix = "start it with torchrun --nproc-per-node 2 -m v41.tools.cli bench sharded"


class NoInspection(V41Error):
    """facts: reason."""

    found = "the file holds no inspection: {reason}"
    fix = "make one: v41 inspect --preset NAME --json > FILE"


class InvariantBroken(V41Error):
    """facts: run (the pass), rule, node, detail."""

    found = "pass {run} left a program in which a rule is broken: it {rule}; {node}: {detail}"
    fix = "correct the pass; meanwhile the program compiles without it"


class PassFailed(V41Error):
    """facts: run (the pass), error."""

    found = "pass {run} raised {error}"
    fix = 'correct the pass, or compile without it: options={{"strict": False}}'


class UnknownPass(V41Error):
    """facts: name, known (as text)."""

    found = "there is no pass {name!r}"
    fix = "use one of: {known}"


class UnknownSite(V41Error):
    """facts: run (the pass), site, known (as text)."""

    found = "pass {run} judged no site {site!r}"
    fix = "use one of: {known}; of any other node v41 explain says what became of it"


class AmbiguousSite(V41Error):
    """facts: run (the pass), site, count, candidates (a line each)."""

    found = "pass {run} judged {count} sites called {site!r}, in as many programs:\n{candidates}"
    fix = "take one by its whole name, as it stands there; /NODE is in the program itself"


class NoChangesKept(V41Error):
    """No facts."""

    found = "the file does not say what each pass changed"
    fix = "make one that does: v41 inspect --preset NAME --json --changes > FILE"


class PassEditsPlan(V41Error):
    """facts: name."""

    found = "{name} changes a program's plan, not its graph"
    fix = "see what it decided with v41 why-not {name}, and the plan with v41 partition or v41 timeline"


class PlanUnreadable(V41Error):
    """facts: reason."""

    found = "the text holds no plan: {reason}"
    fix = "hand over what Plan.to_json wrote, by this version of v41"


class PlanBroken(V41Error):
    """facts: rule, first, second (pieces, or "start" or "end"), detail."""

    found = "a plan breaks a rule: it {rule}; {first} and {second}: {detail}"
    fix = "correct what wrote the plan (partition, or who moved pieces to streams); nothing of it has run"


class UnknownModel(V41Error):
    """facts: name, known (as text)."""

    found = "there is no model {name!r}"
    fix = "use a preset ({known}), a checkpoint folder, a folder that v41 capture wrote, or MODULE:FUNCTION"


class FunctionUnusable(V41Error):
    """facts: function, problem."""

    found = "{function} gives no model: {problem}"
    fix = "name an importable function without arguments that returns (model, inputs), inputs a tuple or list"


class GraphNotWhole(V41Error):
    """facts: reason."""

    found = "Dynamo cannot trace the call as one graph: {reason}"
    fix = "change the line it names, or capture a part of the model that it can trace"


class ModelFails(V41Error):
    """facts: error."""

    found = "the model fails in this call: {error}"
    fix = "correct that line, or the inputs that are given with the model; run it once without v41"


class RunUnreadable(V41Error):
    """facts: reason."""

    found = "the folder holds no run that this v41 reads: {reason}"
    fix = "capture it again: v41 capture MODEL -o FOLDER"


class RunNotWritten(V41Error):
    """facts: problem."""

    found = "the run cannot be written there: {problem}"
    fix = "name a folder that is not there yet, or one that holds a run"


class FileNotWritten(V41Error):
    """facts: problem."""

    found = "the file cannot be written there: {problem}"
    fix = "name a file in a folder that you may write to"


class KernelsNotWritten(V41Error):
    """facts: problem."""

    found = "generated kernels are kept as files, which Triton reads, and none can be written there: {problem}"
    fix = "set XDG_CACHE_HOME to a folder that you may write to"


class NeedsModel(V41Error):
    """facts: what, source (of the run), command (that does it)."""

    found = "a saved run holds what was found in a graph, not the graph, and {what}"
    fix = "name what was captured, {source}: {command}"


class PresetsAlone(V41Error):
    """facts: source."""

    found = "--measure runs a preset, whole or its first layers, in this process, and this is {source}"
    fix = "leave --measure out for what is predicted, or measure a preset: v41 timeline tiny --measure"


class UnusedOption(V41Error):
    """facts: option, reason."""

    found = "{option} would change nothing here: {reason}"
    fix = "leave {option} out"


class StepTooLarge(V41Error):
    """facts: rows, most."""

    found = "a step of {rows} rows is not reckoned: its batch is laid out row by row"
    fix = "give at most {most} rows"


class ContextBeyondModel(V41Error):
    """facts: context, most."""

    found = "no request of this model has {context} tokens: it knows positions for {most}"
    fix = "give at most {most} tokens"


class ModelBeyondMemory(V41Error):
    """facts: needed, there (GiB)."""

    found = "the weights of this model take {needed:.1f} GiB, and this machine has {there:.1f} GiB of memory"
    fix = "take fewer layers (--cut of a bench, --layers), a smaller preset, or a machine with more memory"


class RowsBeyondBuckets(V41Error):
    """facts: rows, most."""

    found = "no decode step has {rows} rows: the largest bucket in which one is captured whole holds {most}"
    fix = "give at most {most} rows; v41 cost --tokens {rows} tells of a larger step"


class UnknownNode(V41Error):
    """facts: name, known (as text)."""

    found = "no node, region, piece or line of the model is called {name!r}"
    fix = "use a name that v41 partition, v41 diff or a report shows: {known}"


class AmbiguousNode(V41Error):
    """facts: name, count, candidates (as text, a line each)."""

    found = "{count} nodes are called {name}:\n{candidates}"
    fix = "give one of these as it stands here"


class SizesMissing(V41Error):
    """facts: sizes (as text)."""

    found = "the program's work depends on sizes that have no number: {sizes}"
    fix = "give each one: --size NAME=NUMBER"


class UnknownSize(V41Error):
    """facts: name, known (as text)."""

    found = "no size of the program that changes is called {name!r}"
    fix = "use one of: {known}"


class UnknownGPU(V41Error):
    """facts: name, known (as text)."""

    found = "no figures are known of a GPU {name!r}"
    fix = "use one of: {known}"


class UnknownKernel(V41Error):
    """facts: name, known (as text)."""

    found = "no one generated kernel is called {name!r}"
    fix = "use one of: {known}"


class CheckNotStarted(V41Error):
    """facts: problem."""

    found = "the check does not start: {problem}"
    fix = "give the command as one types it: v41 bisect python check.py"


class PeerStalled(V41Error):
    """facts: rank (that waited), peer (for whom), epoch (how many calls of this kind there were), seconds."""

    found = (
        "rank {rank} waited {seconds} s for rank {peer}, in call {epoch} of its kind; results since then are garbage"
    )
    fix = "see what rank {peer} does (it failed, hangs, or runs another program); then start all ranks anew"


class ChannelsFull(V41Error):
    """facts: words (asked for), left (words of the workspace)."""

    found = "a kernel asks for {words} words that ranks share, and {left} are left"
    fix = "make the workspace larger: symmetric.workspace(..., words=...)"


class NoWorkspace(V41Error):
    """facts: kernel."""

    found = "kernel {kernel} adds over ranks and was given no memory that they share"
    fix = "bind a workspace of the group before the first call"


class NotSymmetric(V41Error):
    """facts: reason."""

    found = "ranks of this group cannot write each other's memory: {reason}"
    fix = "run one host's GPUs that reach each other (NVLink), or leave the collective as it is"


class RanksDisagree(V41Error):
    """facts: rank, other, group, number (of the collective), ours, theirs (as text)."""

    found = "ranks {rank} and {other} of group {group} compiled other programs: number {number} is {ours}; {theirs}"
    fix = "give all ranks the same model, options, batch and versions; with this they would wait for each other forever"


class StoreLost(V41Error):
    """facts: rank (of who says so), group, what (the others were to have done)."""

    found = "rank {rank} cannot reach the store of group {group}, where ranks say that they have {what}"
    fix = "see what the rank that holds the store raised, mostly rank 0; then start all ranks anew"


class RankMissing(V41Error):
    """facts: rank, group, what (it has not done, "compiled program"), number (of that), seconds."""

    found = "rank {rank} of group {group} has not {what} {number} of this group within {seconds} s"
    fix = "see what that rank raised; where it compiles for longer, give init_process_group a larger timeout="
