"""hints: what to change in the model so that a rule holds, by the sentence that a pass refuses with."""

from __future__ import annotations

from v41.report import Decision

HINTS = {
    "alternates between the last two axes": "normalise rows and columns in turn, over dimensions -1 and -2",
    "works on square matrices": "give the matrices as many rows as columns",
    "keeps one eps": "add the same eps in every step",
    "divides the same way in every step": "spell all steps alike: a division, or a product with the reciprocal",
    "is read outside at its end only": "read the result of the last step, no step in between",
    "no path leaves it and comes back": "feed nothing that is computed from a part of the boundary back into it",
    "nothing is written in between, and no effect reads it there": "move the write before or behind the boundary",
    "the streams are collapsed once, for one norm": "collapse once, and share the result between its readers",
    "the collapse is sum_j pre_j X_j": "weigh each stream with its own pre, and sum over the streams alone",
    "the carried pre comes from an earlier boundary": "collapse with the pre that the boundary before predicted",
    "the post map is post_k y + sum_j comb_jk X_j": "add to each stream post times y and the streams mixed by comb",
    "one pre, one post and one comb are predicted": "predict all three from one projection of the streams",
    "the projection is divided by the RMS of the streams it reads": "take the RMS of the streams that are projected",
    "there are as many streams as pre, post and rows of comb": "predict a pre, a post and a row of comb per stream",
    "comb is one Sinkhorn chain": "see what the chain was refused for: v41 why-not fold_sinkhorn",
    "the scores are sqrt(softplus) or sigmoid of one product": "score with one of the two, and nothing between",
    "nothing is rounded between the product and the weights": "keep scores and weights in fp32",
    "the picks are the best by score, or by score and bias, the best first": "rank by what the router scores",
    "only weights and picks are read outside": "return neither logits nor scores of the router",
    "ends a chain of known views and writes of the input": "write the cache by index, slice or copy_ alone",
    "is not read in a state that a write has overwritten": "read the cache before the write, or what it holds after it",
    "takes no values from the memory it writes": "clone what is read of the cache before it is written back",
    "is neither written nor aliased by other operators": "write the cache in one way, and return no view of it",
    "keeps the strides that views of its result rely on": "write into the cache as it lies in memory",
    "is not returned as a value of its own": "return nothing: the caller has the cache already",
    "the row is divided by its own root mean square": "take the mean of squares of the very row that is divided",
    "bytes of the row have scales of its own, one for each group or for all of it":
        "divide by its largest / 448 in fp32, or the power of two above, of the row or of 16 to 128 channels",
    "only the row when normed, turned or quantised is read outside": "read the result; recompute what is on the way",
    "the row is the sum of values by the softmax of gates over the group": "weigh values with the softmax as it is",
    "gates and values are pooled in fp32": "round the pooled row, nothing before it",
    "the gate is the sigmoid of the signed root of the normed product of streams and keys": "see model_def/engram.py",
    "nothing is rounded before the streams are": "compute the gate in fp32, and round the new streams alone",
    "each hash is the xor of the first ids, multiplied": "multiply each id with a number, and xor them in order",
    "a row is stored as it is or in groups of fp8": "store e4m3 and a ue8m0 byte a group, or floats",
    "only its result is read outside": "read the result; recompute what is on the way",
    "the scores are a sum over heads of weighed, rectified products of queries and keys":
        "score by sum_h w_h relu(q_h . k), every head once",
    "nothing is rounded between queries, keys, weights and scores": "multiply and add up in fp32",
    "the picks are the best entries that a row may see, ascending, then -1":
        "sort the top-k entries and put -1 where none is left",
    "the blocks kept are the best by their best entry, and that of the newest entry a row sees":
        "rank blocks by their largest score, the newest block first",
    "only picks and kept blocks are read outside": "return picks and kept blocks alone, no scores",
    "the candidates are blocks that another indexer keeps, each repeated for its entries":
        "hand the kept blocks on as they are, repeated for their entries",
    "there are as many candidates as picks": "keep more blocks of entries, or pick fewer",
    "ties go to the lower entry": "rank unique keys, or sort with stable=True",
    "keys are taken from a cache, by slots of requests and numbers of entries":
        "index the stored records by slot and entry",
    "rows, requests, columns and blocks are counted by sizes of their own":
        "mark rows, requests, columns and blocks as sizes that differ",
    "every size in it is one of rows, requests, columns or entries":
        "derive the sizes in the indexer from rows, requests and entries by sums and products",
    "the keys are the values, one latent for all heads": "read values from what the scores were taken with",
    "all sizes but that of the rows are numbers": "gather as many keys for every row, and hide what it may not see",
    "it reads queries, one or two branches of keys with a mask each, and a sink": "give each branch a mask of its own",
    "scores and sums are fp32, and p is rounded for the values alone": "cast p for its product with values alone",
    "it is a softmax of scaled scores, hidden keys left out, a sink in the total":
        "give hidden keys a score of -inf, and scores no bounds",
    "the output turns back by what turned the queries": "turn both by one table, the output with -sin",
    "RoPE is fp32, rounded once": "cast what turns to fp32 first, and round the result once",
    "only its output is read outside": "return and reuse the output alone, no step on the way to it",
    "its records are gathered from a cache by a slot a row and a place a key, or are of this step":
        "index the cache by the slot of each row and the place of each key, or choose between that and this step's",
    "what gathers them is read there alone": "gather for attention alone: nothing then lies in memory",
    "records of this step are those of its rows":
        "nothing to change: rows were left out in between, so the records are gathered as before",
    "all its records lie in one slot a row": "read both branches of keys at one slot of each row's request",
    "each of its operands is one thing to attention":
        "keep window and entries in caches of their own, and make places, rows and masks apart",
    "what is written over them meanwhile can wait": "write the cache behind attention, or read what the write leaves",
    "between the products stand views, one cast and one rounding to groups at most": "round by fake_quant of a format",
    "the grouped product is rounded once": "multiply in fp32 and cast, or in bf16 without another cast",
    "each group of heads meets its own A, and all meet B": "lay the groups of heads, and their results, side by side",
    "rows of x are taken by expert, for every pick once": "sort the picks, take x by them, and count where experts end",
    "weights, and what they are multiplied with, have one format each":
        "store W1, W3 and W2 alike, and round what each of them reads in the same way",
    "W2 reads silu(W1 x) * W3 x, both clamped by one limit or neither":
        "clamp the gate above and the other branch on both sides, by one number",
    "the router's weight enters before W2": "multiply the activation by the weight, before it is rounded",
    "the outputs of a row's picks are added, and nothing else is": "sum what W2 gives for the picks of a row",
    "only the input of W2 and the sum are rounded": "compute activation and sum in fp32, and round each at its end",
    "one number reduced is that number": "reduce by sum, avg, min, max or product",
    "one value is reduced at a time": "all-reduce each value by itself",
    "what ranks have is added up": "reduce by sum, and divide behind the norm or in the weights",
    "floats of 16 or 32 bits are added": "add up bf16, fp16 or fp32",
    "its group is known here, and has several ranks": "initialise the group before compiling, and pass its name",
    "all sums of a program are taken over one group": "use one process group for the sublayers of a model",
    "the sum is waited for before anything reads it": "read what wait_tensor returns, and nothing earlier",
    "nothing is computed between the collective and its wait": "wait at once: the kernel hides that time by itself",
    "an mHC boundary or a norm reads the sum, or the sum with a residual":
        "add the residual and norm, or mix into the streams, right behind the sum",
    "no other all-reduce stands nearer to what reads the sum": "add up on each rank first, and all-reduce once",
    "a rank's own part is read by the collective alone": "read the sum instead, or compute the part twice",
    "nothing leaves the region and comes back": "feed nothing that is computed from the sum back into what norms it",
    "experts' outputs are added up to the part, which nobody else reads":
        "hand what the experts add up to the all-reduce alone",
    "the part is a sum, a cast or a view of rows": "scale, add up and cast the rows of experts, and nothing else",
    "what is on the way to the part is read there alone": "read the sum, or compute again what is on the way to it",
    "each row of the part is made of rows of its own": "add up over the picks of a token, not over tokens",
    "rows are named by a sort of as many": "take the rows of experts by the inverse of the sort that grouped them",
    "what it is made of is not written over meanwhile":
        "write caches behind the sum, or read what the part needs of them before",
    "what it is made of is no wider than the part": "return what experts compute in the dtype of the sum",
    "no write, collective or draw stands between the collective and what reads the sum":
        "move the other collective, draw or write before the all-reduce, or behind the norm",
    "writes inputs at its end alone": "let AOTAutograd make the graph functional, which puts writes at its end",
    "mixes rows in no way that row demand does not know": "mix rows by index, window or sort by expert, or before",
    "reads early values whose rows can be taken": "lay rows along dimension 0, one entry a row",
    "has sizes that follow from how many rows there are": "take sizes from the tensors that are read",
    "only computes": "leave writes, draws and collectives to the pieces around the look-up",
    "hangs on values that are there before the device works in front of it, and are not written":
        "look up by token ids alone, in tables that no step writes",
    "its piece can be captured": "keep tables on the device: what asks the host is in no graph",
    "what runs beside it takes longer than it does": "nothing to change: there is too little beside it to hide it",
    "it gains where it was measured on this GPU":
        "nothing to change: steps were longer with it; `v41 bench overlap --sites` measures it again",
    "it spares more than fork and join cost": "nothing to change: the split piece takes as long as the whole one",
}
AS_IT_IS = "nothing to change"  # so begin the hints of what no other spelling of the model would spare
GENERAL = "change the line at fault so that the rule holds; meanwhile these nodes run as they are: right, only slower"


def hint(decision: Decision) -> str:
    """What to do about a refusal; without a hint of its own, what a refusal costs."""
    return HINTS.get(str(decision.rule), GENERAL)


def is_to_mend(decision: Decision) -> bool:
    """Whether another spelling of the model would spare this refusal: such a one is what --strict counts."""
    return not decision.applied and not hint(decision).startswith(AS_IT_IS)
