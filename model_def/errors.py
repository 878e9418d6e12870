"""Every way the plain model refuses: one type a fact, each with what was found, where, and what to do."""

from __future__ import annotations

from collections.abc import Sequence


class ModelError(Exception):
    """What was found, where, what to do. `facts` fill the class's two sentences."""

    found = fix = ""

    def __init__(self, where: object, **facts: object) -> None:
        self.where, self.facts = where, facts
        super().__init__(f"{self.found.format(**facts)}\n  at   {where}\n  fix  {self.fix.format(**facts)}")


def bullets(lines: Sequence[str]) -> str:
    """One fact a line, for the errors that list all they found."""
    return "".join(f"\n       - {line}" for line in lines)


def some_of(names: Sequence[str], most: int = 5) -> str:
    """The first few, and how many there are beside them: a wrong checkpoint may have tens of thousands."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


class ConfigError(ModelError, ValueError):
    """Fields that contradict each other. facts: broken, a tuple of (rule, culprit)."""

    found = "the configuration contradicts itself in {count} place(s):{listing}"
    fix = "change the fields named; each line says the rule first and what breaks it after the colon"

    def __init__(self, where: object, broken: Sequence[tuple[str, str]]) -> None:
        listing = bullets([f"{rule}: {culprit}" for rule, culprit in broken])
        super().__init__(where, count=len(broken), listing=listing, broken=tuple(broken))


class ConfigFileError(ModelError, ValueError):
    """A config.json whose fields are unknown or missing. facts: unknown, missing (tuples of names)."""

    found = "the configuration file does not describe a V4.1 text model:{listing}"
    fix = "use the released config.json layout (text_config) or the flat inference/config.json names"

    def __init__(self, where: object, unknown: Sequence[str], missing: Sequence[str]) -> None:
        lines = [f"{name}: no such field" for name in unknown] + [f"{name}: missing" for name in missing]
        super().__init__(where, listing=bullets(lines), unknown=tuple(unknown), missing=tuple(missing))


class UnknownPreset(ModelError, KeyError):
    """facts: name, known."""

    found = "there is no preset {name!r}"
    fix = "use one of: {known}"

    def __str__(self) -> str:  # KeyError would show the repr
        return str(self.args[0])


class CheckpointError(ModelError):
    """Tensors that are missing, unexpected, not where the index says, mis-shaped or of another dtype; facts of those
    names."""

    found = "the checkpoint does not fit the model, {count} tensor(s):{listing}"
    fix = "load the checkpoint with its own config.json, or repair the tensors named"

    def __init__(
        self,
        where: object,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        shape: Sequence[str] = (),
        dtype: Sequence[str] = (),
        misplaced: Sequence[str] = (),
    ) -> None:
        groups = {"missing": missing, "unexpected": unexpected, "misplaced": misplaced, "shape": shape, "dtype": dtype}
        lines = [f"{kind}: {line}" for kind, found in groups.items() for line in found]
        facts = {kind: tuple(found) for kind, found in groups.items()}
        super().__init__(where, count=len(lines), listing=bullets(lines), **facts)


class CheckpointFileError(ModelError, FileNotFoundError):
    """facts: problem."""

    found = "the checkpoint folder cannot be read: {problem}"
    fix = "point at a folder with config.json and model.safetensors, or shards with model.safetensors.index.json"


class FileUnreadable(ModelError, ValueError):
    """A file of a checkpoint that is cut short or of another format. facts: problem."""

    found = "the file cannot be read: {problem}"
    fix = "fetch or write it again: it was cut short, or holds something else than its name says"


class TokenizersMissing(ModelError, ImportError):
    """No facts."""

    found = "a tokenizer.json is read by the package tokenizers, which is not installed"
    fix = "install it: pip install tokenizers"


class TokenMapError(ModelError):
    """facts: shape, dtype, lowest, highest, ids, compressed."""

    found = "a token map of shape {shape}, {dtype}, with compressed ids {lowest} to {highest} is none for this model"
    fix = "give a compressed id below {compressed} for at most {ids} token ids, one dimension of integers"


class TokenizerOfAnother(ModelError, ValueError):
    """facts: problem."""

    found = "the tokenizer is another model's: {problem}"
    fix = "put the model's own tokenizer.json beside its tensors, or its token map into engram_token_map.safetensors"


class CheckpointNotWritten(ModelError, OSError):
    """facts: problem."""

    found = "the checkpoint cannot be written: {problem}"
    fix = "give a model with values, and a folder, there or not, that may be written and has room for it"


class NoSuchRank(ModelError, ValueError):
    """facts: rank, world."""

    found = "there is no rank {rank!r} of {world!r}"
    fix = "give world, how many ranks, as an integer above 0, and rank as one from 0 to world - 1"


class ShareNotWhole(ModelError, ValueError):
    """facts: world, sizes (those that do not divide, by name; those under scales by "name in groups of 32")."""

    found = "{world} ranks cannot share {sizes}"
    fix = "take a number of ranks that divides all of them, and of those in groups the number of groups"


class RankAlone(ModelError, ValueError):
    """facts: rank, world."""

    found = "the model is the share of rank {rank} of {world}, and knows no group of processes to add up with"
    fix = "load it in each of them with share=Share.of_group(torch.distributed.group.WORLD), or whole without a share"


class PartOfAModel(ModelError, ValueError):
    """facts: rank, world."""

    found = "the model is the share of rank {rank} of {world}, and a checkpoint holds whole tensors"
    fix = "write the model that was loaded without a share"


class CacheHasNoRoom(ModelError, ValueError):
    """facts: name ("slots" or "capacity"), value."""

    found = "a cache of {name}={value!r} holds no token of any request"
    fix = "give slots, how many requests, and capacity, how many tokens of each, as integers above 0"


class CacheBeyondPositions(ModelError, ValueError):
    """facts: capacity, positions."""

    found = "a cache for requests of {capacity} tokens is longer than the {positions} positions the model is made for"
    fix = "give a smaller capacity; max_position_embeddings of the config says how far RoPE is stretched"


class RequestWithoutPrompt(ModelError, ValueError):
    """facts: prompt, known, length."""

    found = "a request reads a prompt of {prompt!r} tokens, of {known} that it has, and is to be {length!r} long"
    fix = "give a prompt of one token or more, within the tokens it has, and a length of at least so many, as integers"


class RequestGivenTwice(ModelError, ValueError):
    """facts: first, second (numbers of the requests)."""

    found = "requests {first} and {second} are one object, and each would write its tokens into it"
    fix = "make a Request for each"


class StepsWithoutRows(ModelError, ValueError):
    """facts: chunk."""

    found = "steps of chunk={chunk!r} rows read no prompt"
    fix = "give chunk, rows of one prompt in a step, as an integer above 0"


class NoTemperature(ModelError, ValueError):
    """facts: temperature."""

    found = "no token can be drawn at a temperature of {temperature!r}"
    fix = "give a number above 0; for the likeliest token choose with greedy"


class LogitsAreNoNumbers(ModelError, ValueError):
    """facts: rows (which of them, a number or a request and its position each), total."""

    found = "no token can be chosen: of {total} row(s) of logits these hold NaN or infinities: {listing}"
    fix = "look at the weights first: a scale or a tensor of the checkpoint that is damaged reaches every logit"

    def __init__(self, where: object, rows: Sequence[object], total: int) -> None:
        super().__init__(where, rows=tuple(rows), total=total, listing=some_of(list(map(str, rows))))


class ChunkMistyped(ModelError, TypeError):
    """facts: what ("chunks", "a chunk" or its field), value, wanted."""

    found = "{what} cannot be {value}"
    fix = "give {wanted}"


class ChunkOutOfTokens(ModelError, ValueError):
    """facts: chunk, start, stop, known."""

    found = "chunk {chunk} covers positions {start} to {stop}, of {known} known tokens"
    fix = "pass the request's tokens from its first one on, at least to the end of the chunk, and start <= stop"


class NoSuchSlot(ModelError, ValueError):
    """facts: chunk, slot, last."""

    found = "chunk {chunk} uses cache slot {slot}, and the cache has slots 0 to {last}"
    fix = "use a slot the cache has, or build the cache with more"


class SlotUsedTwice(ModelError, ValueError):
    """facts: slot, first, second (numbers of the chunks)."""

    found = "chunks {first} and {second} both use cache slot {slot}"
    fix = "give every request of a step a slot of its own; rows of one request are one chunk"


class BatchOfAnotherCache(ModelError, ValueError):
    """facts: built, given, each (slots, capacity)."""

    found = "the batch was built for a cache of (slots, capacity) {built}, and this one has {given}"
    fix = "build the batch with the cache it runs with: its pad rows write the slot behind the last of that one"


class OfAnotherModel(ModelError, ValueError):
    """facts: made_for, given, each lines of "name = value"."""

    def __init__(self, where: object, made_for: str, given: str) -> None:
        pairs = zip(made_for.splitlines(), given.splitlines(), strict=True)
        listing = bullets([f"{was}, and in this model {now}" for was, now in pairs if was != now])
        super().__init__(where, listing=listing, made_for=made_for, given=given)


class BatchOfAnotherModel(OfAnotherModel):
    """What a batch was built from is not what this model has."""

    found = "the batch was built with the config of another model:{listing}"
    fix = "build the batch with the config of the model it runs in"


class CacheOfAnotherModel(OfAnotherModel):
    """The records of a cache are not those that this model keeps."""

    found = "the cache was made for another model:{listing}"
    fix = "make the cache with the config of the model: Cache.zeros(model.config, ...)"


class ChunkLongerThanSlot(ModelError, ValueError):
    """facts: chunk, stop, capacity."""

    found = "chunk {chunk} runs to position {stop}, and a cache slot holds {capacity} tokens"
    fix = "build the cache with a larger capacity, or end the request earlier"


class HitNotReplayable(ModelError, ValueError):
    """facts: chunk, start, hit, ratio, floor."""

    found = "chunk {chunk} starts at position {start} with a prefix hit of {hit} tokens"
    fix = "let a hit end between groups (a multiple of {ratio}) and start at {floor} or later: that window runs again"


class HitBeyondTokens(ModelError, ValueError):
    """facts: chunk, hit, known."""

    found = "chunk {chunk} has a prefix hit of {hit} tokens, of {known} known tokens"
    fix = "let a hit cover tokens of the request alone"


class EntriesNotThere(ModelError, ValueError):
    """facts: tokens, source, slot, last, capacity."""

    found = "{tokens} tokens of cache slot {source} were to go into slot {slot}"
    fix = "copy 0 to {capacity} tokens, between slots 0 to {last}"


class LogprobsAfterHit(ModelError, ValueError):
    """facts: chunk, hit."""

    found = "chunk {chunk} asks for every row's logits after a prefix hit of {hit} tokens, whose rows do not all run"
    fix = "read such a request from its first token on, without a hit"


class NoSuchFollowing(ModelError, ValueError):
    """facts: chunk, following."""

    found = "chunk {chunk} says that {following} rows follow it"
    fix = "give following, how many rows the request's next chunk has, as 0 or more"


class LogprobsLeftOut(ModelError, ValueError):
    """facts: chunk, following."""

    found = "chunk {chunk} asks for every row's logits, and of a chunk that {following} rows follow none are returned"
    fix = "leave following at 0 where logits are asked for"


class TokenOutOfVocabulary(ModelError, ValueError):
    """facts: chunk, token, position, vocabulary."""

    found = "chunk {chunk} holds token {token} at position {position}, and the vocabulary has {vocabulary} tokens"
    fix = "tokenize with the model's own tokenizer"


class LadderNotAscending(ModelError, ValueError):
    """facts: ladder, rungs."""

    found = "the ladder {ladder} is {rungs!r}"
    fix = "give a tuple of integers above 0, each larger than the one before"
