"""protocol: how ranks hand each other rows, as the text of Triton functions, and why no rank reads what is not there.

All ranks run the same calls with the same number of rows in the same order, each on one stream. A channel
(v41/channels.py) is memory that every rank can write, counters that only its owner touches, and one kind of use.

One shot (few rows): words
    send      writes each element to every rank, its own included, as a word: the element's bits and, above them, the
              low bits of the epoch. A word is written and read in one piece (st.relaxed.sys, ld.volatile), so whoever
              sees the epoch has the element, and nothing has to be ordered with anything: no flag, fence or barrier.
              Whether the element was loaded or made (front.py) is no matter: no program waits before it has sent.
    received  reads until every word of every rank has this epoch, then adds in the order of ranks.
    Threads   a program has at most as many threads as a tile has words, so no word is read by two of them, of whom one
              might see it and the other go on without it.
    Slot      programs of the same number on all ranks have a slot of the channel, two halves of it in turn, and the
              slot's epoch in device memory: a replayed graph counts on. The next launch of a slot comes after this one
              on the stream, so the epoch is read, then written, by one program at a time.
    Overrun   a rank writes epoch k + 2 where k lay, in a launch behind the one of k + 1. That one ended when words of
              k + 1 had come from every rank; a rank sends those in a launch behind its own of k, whose reads are over.
    ABA       every word of a half is written in every use of it, those of rows that are not there too. So a word that
              is not of epoch k is of k - 2 or zero, whose low bits differ; epochs begin at 1.

Two shots (many rows): flags
    scatter   writes this rank's rows into the inbox of each row's owner, then the flag of the unit there.
    gather    the owner waits for the flags of all ranks, adds in their order, rounds, writes the sum to every rank's
              `reduced`, then the flag of the unit on every rank.
    settled   whoever reads rows of `reduced` waits for the flags of their units before.
    Order     data are written by all threads; barrier; st.release.sys by the threads that hold flags. The barrier
              orders the writes before the release, and release is cumulative: it covers them. ld.acquire.sys; barrier;
              reads by all threads, past L1. Peers' memory and this GPU's are one to scope sys.
    Overrun   a unit's inbox is written again only behind a launch that waited for its flag of the sum, which its owner
              set after reading the inbox; units of other calls lie there too, and that launch waited for all of its
              call. `reduced` is written again when flags of the next call have come from all ranks, each set behind
              the launches that read the sum of this one. Hence one buffer each.
    ABA       a flag holds the unit's epoch, which only grows and is waited for by equality; a flag cannot run ahead,
              by the paragraph above.

No rank waits for a program that may not be there: a program of one shot waits for those of the same slot, all slots fit
on the GPU at once (launch.py), and a launch of two shots waits for earlier launches alone.

A wait ends after the workspace's patience. Then it leaves a record (v41/channels.py) in `failed`, where the first one
stays and keeps programs that begin later from waiting as long (one that runs may wait again for each chunk it has), and
where the host looks. What is computed from there on is garbage; the host says so.
"""

from __future__ import annotations

CLOCK = "mov.u64 $0, %globaltimer;"
PUT_32 = "st.relaxed.sys.global.b32 [$1], $2; mov.u32 $0, 0;"
PUT_64 = "st.relaxed.sys.global.b64 [$1], $2; mov.u32 $0, 0;"
ACQUIRE = "ld.acquire.sys.global.b32 $0, [$1];"


def helpers(ranks: int, wide: bool) -> str:
    """The functions, for so many ranks. wide: elements of 4 bytes, else of 2."""
    every = range(ranks)
    mails = ", ".join(f"mail_{r}" for r in every)
    padded = 1 << (ranks - 1).bit_length()
    word, bits, half = ("tl.int64", "tl.int32", 32) if wide else ("tl.int32", "tl.int16", 16)
    mask = f"0x{(1 << half) - 1:x}"
    put = (PUT_64, "=r,l,l") if wide else (PUT_32, "=r,l,r")

    def each(text: str) -> str:
        return "\n".join(text.format(r=r) for r in every)

    puts = each("    put(mail_{r} + where, word)")
    loads = each("    w{r} = tl.load(mail + {r} * apart, volatile=True)")
    again = loads.replace("    w", "            w")
    adds = "\n".join(f"    total = total + element(w{r}, KIND)" for r in every[1:])
    flags = each("    at = tl.where(rank == {r}, (mail_{r} + where).to(tl.int64), at)")
    return f'''

@triton.jit
def clock(x):
    """Nanoseconds, for each element of `x`: what is decided by time must be folded, or threads would differ."""
    return tl.inline_asm_elementwise("{CLOCK}", "=l,r", [x.to(tl.int32)], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def put(where, word):
    tl.inline_asm_elementwise("{put[0]}", "{put[1]}", [where, word], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def acquired(flags):
    return tl.inline_asm_elementwise("{ACQUIRE}", "=r,l", [flags], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def stalled(record, failed, site, peer, epoch):
    """Leaves what the host is to say: see v41/channels.py."""
    told = (site.to(tl.int64) + 1) << 40 | peer.to(tl.int64) << 32 | (epoch.to(tl.int64) & 0xFFFFFFFF)
    tl.atomic_cas(failed, tl.zeros([], tl.int64), told, sem="relaxed", scope="gpu")  # the first one stays
    tl.store(record, told)


@triton.jit
def send({mails}, where, x, epoch):
    """Element `x` to place `where` of every rank, in a word with the epoch."""
    word = (x.to({bits}, bitcast=True).to({word}) & {mask}) | (epoch.to({word}) << {half})
{puts}


@triton.jit
def has(word, epoch):
    return (word >> {half}) == ((epoch.to({word}) << {half}) >> {half})


@triton.jit
def element(word, KIND: tl.constexpr):
    return (word & {mask}).to({bits}).to(KIND, bitcast=True).to(tl.float32)


@triton.jit
def received(mail, apart, epoch, limit, record, failed, site, KIND: tl.constexpr):
    """The sum of what all ranks sent here, rounded: rank r's words lie r times `apart` behind `mail`."""
{loads}
    missing = {_missing(every)}
    if missing != 0:
        begin = clock(w0)
        while missing != 0:
{again}
            missing = {_missing(every)}
            if missing != 0:
                if tl.max((clock(w0) - begin > limit).to(tl.int32)) != 0:
                    stalled(record, failed, site, missing - 1, epoch)
                    missing = missing * 0
    total = element(w0, KIND)
{adds}
    return total.to(KIND)


@triton.jit
def wait(flags, there, epoch, whose, limit, record, failed, site):
    """Until all `flags` that are `there` have their epoch; `whose` says which rank sets each."""
    missing = tl.max(tl.where(there & (acquired(flags) != epoch), whose + 1, 0))
    if missing != 0:
        begin = clock(whose)
        while missing != 0:
            missing = tl.max(tl.where(there & (acquired(flags) != epoch), whose + 1, 0))
            if missing != 0:
                if tl.max((clock(whose) - begin > limit).to(tl.int32)) != 0:
                    stalled(record, failed, site, missing - 1, tl.max(epoch))
                    missing = missing * 0
    tl.debug_barrier()


@triton.jit
def signal({mails}, where, epoch, first, last):
    """Sets flag `where` of ranks first to last, after all that this program wrote before."""
    tl.debug_barrier()
    rank = tl.arange(0, {padded})
    at = tl.zeros([{padded}], tl.int64)
{flags}
    tl.atomic_xchg(at.to(tl.pointer_type(tl.int32)), tl.zeros([{padded}], tl.int32) + epoch,
                   mask=(rank >= first) & (rank <= last) & (rank < {ranks}), sem="release", scope="sys")


@triton.jit
def patience(failed, limit):
    """`limit`, and next to nothing once a wait has failed."""
    return tl.where(tl.load(failed) != 0, 0, limit)
'''


def _missing(every: range) -> str:
    """Text: 1 + the last rank whose words are not all there, 0 if all are."""
    parts = [f"tl.where(has(w{r}, epoch), 0, {r + 1})" for r in every]
    folded = parts[0]
    for part in parts[1:]:
        folded = f"tl.maximum({folded}, {part})"
    return f"tl.max({folded})"
