"""Tests of the tests: every bug seeded into the core is found by the searches, or by a probe named here.

A mutant is a change of the core's text. It is killed if the exhaustive search of a small world reports a
violation of the oracle, or worlds from which no commit can be reached any more, or if a probe fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

Edit = tuple[str, str, str]
MAX_STATES = 40_000
"""A mutant that is not found by then counts as survived; most need a few hundred."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    name: str
    edits: tuple[Edit, ...]
    world: str  # commit, membership, or the name of a probe
    setup: dict[str, Any]
    finds: str  # part of the report expected, so that each dies for its own reason


COMMIT_MUTANTS = (
    Mutant(
        name="the other bank is free",
        edits=(
            (
                "commit",
                "    return 1 - banks.index(keep)",
                "    return 1 - banks.index(max(n for n in banks if n is not None))",
            ),
        ),
        world="commit",
        setup={"last_step": 3},
        finds="the loss of host",
    ),
    Mutant(
        name="a local ack frees a bank",
        edits=(
            (
                "follow",
                "bank = choose_own_bank(rank.own, naming.committed)",
                "bank = choose_own_bank(rank.own, max(n for n in rank.own if n in rank.held))",
            ),
        ),
        world="commit",
        setup={"last_step": 3},
        finds="the loss of host",
    ),
    Mutant(
        name="no refused set",
        edits=(("commit", "            state = replace(state, refused=state.refused | bit)\n", ""),),
        world="commit",
        setup={"last_step": 3},
        finds="stuck",
    ),
    Mutant(
        name="no term",
        edits=(
            (
                "follow",
                "if naming.generation != state.generation or naming.term < state.term:",
                "if naming.generation != state.generation:",
            ),
            (
                "follow",
                "    if term <= state.term or state.naming is None:\n"
                "        return replace(state, term=max(term, state.term)), ()",
                "    if term == state.term or state.naming is None:\n"
                "        return replace(state, term=term), ()",
            ),
        ),
        world="commit",
        setup={"last_step": 2, "elections": True, "coarse": True},
        finds="the loss of host",
    ),
    Mutant(
        name="a new leader commits what the old one named",
        edits=(
            (
                "follow",
                "    step = state.naming.step\n    passed",
                "    return replace(state, term=term), ()\n    step = state.naming.step\n    passed",
            ),
            (
                "commit",
                "    if report.step != state.step or state.committed is None:\n        return state, ()\n",
                """\
    if state.committed is None:
        return state, ()
    if report.step != state.step:
        if report.kind is ReportKind.HELD and report.step > state.committed.step:
            name = Name(step=report.step, generation=state.generation)
            held = dict(state.copies).get(name, 0) | 1 << report.rank
            state = replace(state, copies=((name, held),))
            if held == bitset.full(state.world_size):
                return _commit(replace(state, copies=()), name)
        return state, ()
""",
            ),
        ),
        world="commit",
        setup={"last_step": 2, "elections": True, "coarse": True},
        finds="the loss of host",
    ),
    Mutant(
        name="the holder mirrors the bank number",
        edits=(
            (
                "commit_world",
                "target = choose_holder_bank(complete, name, stream.keep, world.rollback)",
                "target: int | None = stream.bank",
            ),
        ),
        world="commit",
        setup={"last_step": 2, "faults": 1, "coarse": True},
        finds="the loss of host",
    ),
    Mutant(
        name="stream not stopped before overwrite",
        edits=(
            (
                "follow",
                "        effects.append(StopStream(rank=rank.rank, bank=bank))\n"
                "        rank = replace(rank, stream=None)\n",
                "        pass\n",
            ),
        ),
        world="commit",
        setup={"last_step": 3, "faults": 1, "failures": 1},
        finds="torn",
    ),
    Mutant(
        name="committed at once after a recovery",
        edits=(
            (
                "commit",
                "    if common is None or common < state.rollback:\n        return state, ()",
                "    if common is None or common < state.rollback:\n        common = state.rollback",
            ),
        ),
        world="commit",
        setup={"last_step": 2, "faults": 1},
        finds="the loss of host",
    ),
    Mutant(
        name="holders re-chosen before the new copy is committed",
        edits=(
            (
                "follow",
                "    return _protect_rollback(state)\n\n\ndef follow(",
                "    state, effects = _protect_rollback(state)\n"
                "    return state, (*(EmptyHeld(rank=rank) for rank in retired), *effects)\n\n\ndef follow(",
            ),
        ),
        world="commit",
        setup={"hosts": 3, "last_step": 0, "faults": 2, "spurious": True, "reholds": True},
        finds="from now on",
    ),
    Mutant(
        name="the holder receives over its only complete copy",
        edits=(
            (
                "commit",
                "        return 0 if banks[0] is None else 1  # never over the only complete copy",
                "        return 1 if banks[0] is None else 0",
            ),
        ),
        world="commit",
        setup={"last_step": 2},
        finds="the loss of host",
    ),
    Mutant(
        name="committed when one rank holds it",
        edits=(("commit", "if state.held == bitset.full(state.world_size) and", "if state.held and"),),
        world="commit",
        setup={"last_step": 2},
        finds="the loss of host",
    ),
    Mutant(
        name="held is reported before the holder's ack",
        edits=(
            (
                "follow",
                "        return _start_stream(rank, event.bank, state.naming.committed, state.rollback)",
                "        early = _send_report(state, replace(rank, answer=Answer.HELD))\n"
                "        rank, started = _start_stream(\n"
                "            rank, event.bank, state.naming.committed, state.rollback\n"
                "        )\n"
                "        return rank, (*started, early)",
            ),
        ),
        world="commit",
        setup={"last_step": 2},
        finds="the loss of host",
    ),
    Mutant(
        name="an own copy alone counts as committed",
        edits=(("commit", "set(report.own) & set(report.held)", "set(report.own)"),),
        world="commit",
        setup={"last_step": 2, "faults": 1},
        finds="the loss of host",
    ),
    Mutant(
        name="messages of older generations count",
        edits=(
            (
                "follow",
                "if naming.generation != state.generation or naming.term < state.term:",
                "if naming.term < state.term:",
            ),
            ("commit", "        message.generation == state.generation\n        and ", "        "),
        ),
        world="commit",
        setup={"last_step": 1, "faults": 1, "stale": True, "reduced": False, "coarse": True},
        finds="the loss of host",
    ),
)

MEMBERSHIP_MUTANTS = (
    Mutant(
        name="acks of a stale generation are accepted",
        edits=(
            (
                "membership",
                "ack.generation != view.generation or ack.phase",
                "ack.phase",
            ),
        ),
        world="membership",
        setup={"kills": 1},
        finds="2: ",
    ),
    Mutant(
        name="acks are carried over a new failure",
        edits=(("recovery", "        acked=0,\n", "        acked=state.acked if is_aborting else 0,\n"),),
        world="membership",
        setup={"kills": 2},
        finds="3: given up",
    ),
    Mutant(
        name="copies held by the dead survive them",
        edits=(("recovery", "acks=() if is_aborting else state.acks", "acks=state.acks"),),
        world="membership",
        setup={"kills": 2, "spares": 2},
        finds="5: ",
    ),
    Mutant(
        name="the own copy of a replaced member counts as its successor's",
        edits=(
            (
                "plan",
                "if view.member_of_rank(rank) in owners.get(rank, ()):",
                "if rank in owners:",
            ),
        ),
        world="membership",
        setup={"faults": 1},
        finds="5: rank",
    ),
    Mutant(
        name="a joining member counts as restored when the others are",
        edits=(
            (
                "recovery",
                "case Phase.FORMING | Phase.RESTORING if state.acked == bitset.full(state.n_slots):",
                "case Phase.FORMING | Phase.RESTORING if not state.needed & ~state.acked:",
            ),
            ("recovery", '{*view.joining, ""} if is_aborting else {""}', '{*view.joining, ""}'),
        ),
        world="membership",
        setup={"kills": 1},
        finds="2: Phase.RUNNING without",
    ),
    Mutant(
        name="the generation is not raised",
        edits=(
            (
                "recovery",
                "generation=view.generation + 1,\n        phase=Phase.ABORTING",
                "generation=view.generation,\n        phase=Phase.ABORTING",
            ),
        ),
        world="membership",
        setup={"kills": 1},
        finds="2: ",
    ),
    Mutant(
        name="a spare is used twice",
        edits=(("recovery", "        pool.remove(spare)\n", ""),),
        world="membership",
        setup={"kills": 2, "spares": 0, "joins": 1},
        finds="1: a member is named twice",
    ),
    Mutant(
        name="a failed spare stays in the pool",
        edits=(
            (
                "recovery",
                "members=tuple(m for m in state.members if m.id not in gone)",
                "members=state.members",
            ),
        ),
        world="membership",
        setup={"kills": 2},
        finds="1: ",
    ),
    Mutant(
        name="no quorum before RUNNING",
        edits=(
            (
                "recovery",
                "case Phase.FORMING | Phase.RESTORING if state.acked == bitset.full(state.n_slots):",
                "case Phase.FORMING | Phase.RESTORING if state.acked:",
            ),
        ),
        world="membership",
        setup={"kills": 1},
        finds="2: Phase.RUNNING without",
    ),
    Mutant(
        name="the check for lost state is skipped",
        edits=(("recovery", "    if rollback is None:\n        text", "    if False:\n        text"),),
        world="membership",
        setup={"kills": 2, "spares": 2},
        finds="5: RESTORING without",
    ),
    Mutant(
        name="verdict at fault time",
        edits=(
            (
                "recovery",
                "    alive = {member.id for member in state.members} | state.missing\n",
                """\
    for slot in vacate:
        if all(view.slots[h] in (*view.joining, "") or h in vacate for h in view.holders[slot]):
            return end(state, Phase.HALTED, STATE_LOST, reason)
    alive = {member.id for member in state.members} | state.missing
""",
            ),
        ),
        world="membership",
        setup={"faults": 2, "spares": 2},
        finds="3: given up",
    ),
    Mutant(
        name="members that leave are not waited for",
        edits=(
            (
                "recovery",
                " and state.acked_leaving == bitset.full(len(view.leaving))",
                "",
            ),
        ),
        world="membership",
        setup={"faults": 1},
        finds="2: Phase.RESTORING without",
    ),
    Mutant(
        name="copies newer than the rollback step are kept",
        edits=(("plan", "== everyone and name < rollback}", "== everyone or name > rollback}"),),
        world="membership",
        setup={"kills": 1},
        finds="5: ",
    ),
    Mutant(
        name="not the newest live step is chosen",
        edits=(("plan", "return max(live, default=None)", "return min(live, default=None)"),),
        world="membership",
        setup={"kills": 1, "last_step": 2},
        finds="3: back to",
    ),
    Mutant(
        name="replicated bytes are taken for granted",
        edits=(
            (
                "plan",
                "and all(own.get(name, 0) & bitset.of(group.ranks) for group in groups)",
                "and groups is not None",
            ),
        ),
        world="membership",
        setup={"kills": 2, "slots": 4, "spares": 0, "replicated": (0, 2), "last_step": 0},
        finds="5: ",
    ),
    Mutant(
        name="a stalled job waits for ever",
        edits=(("recovery", "        Phase.STALLED: limits.spare_wait_s,\n", ""),),
        world="membership",
        setup={"kills": 1, "spares": 0},
        finds="7: ",
    ),
)


@pytest.mark.parametrize("mutant", COMMIT_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_bug_seeded_into_the_commit_protocol_is_found(
    mutant: Mutant, load_core: Callable[[tuple[Edit, ...]], ModuleType]
) -> None:
    testing = load_core(mutant.edits).testing
    wants_progress = mutant.finds == "stuck"
    setup = testing.commit_world.Setup(**mutant.setup)
    verdict = testing.commit_search.search(setup, max_states=MAX_STATES, checks_progress=wants_progress)
    if wants_progress:
        assert verdict.stuck
    else:
        assert verdict.violation
        assert mutant.finds in verdict.violation


@pytest.mark.parametrize("mutant", MEMBERSHIP_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_bug_seeded_into_the_membership_machine_is_found(
    mutant: Mutant, load_core: Callable[[tuple[Edit, ...]], ModuleType]
) -> None:
    world = load_core(mutant.edits).testing.membership_world
    verdict = world.search(world.Setup(**mutant.setup), max_states=MAX_STATES)
    assert verdict.violation
    assert mutant.finds in verdict.violation


def test_copies_named_by_step_alone_are_found(
    load_core: Callable[[tuple[Edit, ...]], ModuleType],
) -> None:
    """Two generations that ran the same step: their copies do not go together."""

    def is_told_apart(package: Any) -> bool:
        types, plan = package.core.types, package.core.plan
        inventories = [
            types.Inventory(
                member=str(rank),
                copies=(types.RankCopies(rank=rank, own=(types.Name(step=5, generation=rank),)),),
            )
            for rank in (0, 1)
        ]
        return plan.newest_live_name(2, inventories) is None

    edits = (
        ("types", "from dataclasses import dataclass\n", "from dataclasses import dataclass, field\n"),
        (
            "types",
            "    step: int\n    generation: int\n",
            "    step: int\n    generation: int = field(compare=False)\n",
        ),
    )
    assert is_told_apart(load_core(()))
    assert not is_told_apart(load_core(edits))
