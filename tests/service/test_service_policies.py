"""Several policies at once: chosen by name or by weights, told apart in all that the service says."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from service_run import FakeWorker, ServiceRun, service_run, until

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.core.policy_choice import ANY, PolicyChoice
from prorl_hpc.messages.batch import BatchResult, BatchSpec, GroupFilter
from prorl_hpc.messages.control import Pools
from prorl_hpc.messages.errors import ServiceError
from prorl_hpc.messages.inference import WeightUpdate
from prorl_hpc.messages.rollout import FailureKind, RolloutResult, RolloutSpec, Stage, Status
from prorl_hpc.observe.rollout_store import read_rollouts

CHOICE = PolicyChoice(["policy", "base"], {"policy": 3, "base": 1}, seed=7)


def order(batch_id: str = "b", groups: int = 24, **changes: Any) -> BatchSpec:
    rows = [{"id": f"r{i}"} for i in range(groups)]
    return BatchSpec(batch_id, "t", rows, groups, 2, **({"filter": GroupFilter.ALL, "policy": ANY} | changes))


def rollouts_of(result: BatchResult) -> list[RolloutResult]:
    return [rollout for group in result.groups for rollout in group.rollouts]


async def with_both(run: ServiceRun, **settings: Any) -> FakeWorker:
    """A worker, and a server of each policy; rollouts of ``base`` are worth 10 more."""
    worker = await run.worker(reward=lambda spec: spec.sample + 10.0 * (spec.policy == "base"), **settings)
    await run.server("s-policy")
    await run.server("s-base", policy="base")
    return worker


async def test_groups_of_any_are_drawn_by_weights_and_run_on_their_policys_servers(tmp_path: Path) -> None:
    async with service_run(tmp_path, choice=CHOICE) as run, run.client() as client:
        worker = await with_both(run)
        await client.submit_batch(order())
        rollouts = rollouts_of(await client.wait_batch("b"))
        assert {r.policy: r.server for r in rollouts} == {"policy": "s-policy", "base": "s-base"}
        of_group = {r.group_id: r.policy for r in rollouts}
        assert of_group == {f"b.g{i}": CHOICE.resolve(ANY, f"b.g{i}") for i in range(24)}
        assert all(of_group[r.group_id] == r.policy for r in rollouts)
        assert Counter(of_group.values())["policy"] > Counter(of_group.values())["base"] > 0
        for r in rollouts:
            assert worker.ran_on[r.rollout_id] == f"s-{r.policy}"
            assert r.reward == r.sample + 10 * (r.policy == "base")
            assert (r.finish, r.generated_tokens) == ("answer", 1)
        listed = await client.list_rollouts(policy="base", limit=1000)
        assert {p.rollout_id for p in listed} == {r.rollout_id for r in rollouts if r.policy == "base"}
        streamed = [n.result async for n in client.stream(follow=False, policy="base", batch_id="b")]
        assert {r.rollout_id for r in streamed} == {p.rollout_id for p in listed}
        by_name = {status.policy: status for status in await client.policies()}
        for name, mean in (("policy", 0.5), ("base", 10.5)):
            n = sum(r.policy == name for r in rollouts)
            told = by_name[name]
            assert (told.rollouts, told.reward, told.generated_tokens) == ({"done": n}, mean, n)
            assert told.finishes == {"answer": n} and told.seconds is not None and told.servers == 1
        said = dict(line.rsplit(" ", 1) for line in (await client.metrics()).splitlines() if line[0] != "#")
        n = by_name["base"].rollouts["done"]
        assert float(said['prorl_rollouts_ended_total{kind="none",policy="base",status="done"}']) == n
        assert float(said['prorl_rollout_reward_sum{policy="base"}']) == 10.5 * n
        assert float(said['prorl_rollout_finishes_total{finish="answer",policy="base"}']) == n
        assert float(said['prorl_rollout_generated_tokens_total{policy="base"}']) == n
        assert float(said['prorl_rollout_seconds_count{policy="base"}']) == n
    table = read_rollouts(RunDirectory(tmp_path), columns=["rollout_id", "policy"])
    assert dict(zip(*(table[name].to_pylist() for name in ("rollout_id", "policy")), strict=True)) == {
        r.rollout_id: r.policy for r in rollouts
    }


async def test_single_rollouts_of_a_group_agree_and_are_told(tmp_path: Path) -> None:
    async with service_run(tmp_path, choice=CHOICE) as run, run.client() as client:
        await with_both(run)
        specs = [RolloutSpec(f"g{i}s{j}", "t", {}, f"g{i}", j, policy=ANY) for i in range(12) for j in range(2)]
        specs.append(RolloutSpec("alone", "t", {}, policy=ANY))
        progress = await client.submit_rollouts(specs)
        assert [p.policy for p in progress] == [CHOICE.resolve(ANY, spec.group_id or "alone") for spec in specs]
        assert await client.submit_rollouts(specs), "the same order again is the same"


async def test_attempts_and_restarts_keep_the_policy(tmp_path: Path) -> None:
    """A rollout that is tried again, and one that another coordinator finishes in another attempt of the run."""
    broken: set[str] = set()

    def once(spec: RolloutSpec, stage: Stage) -> FailureKind | None:
        first = spec.rollout_id not in broken and "#" not in spec.rollout_id and stage is Stage.INIT
        broken.add(spec.rollout_id)
        return FailureKind.SANDBOX if first else None

    async with service_run(tmp_path, choice=CHOICE) as run, run.client() as client:
        worker = await with_both(run, breaks=once, pools=Pools(ready=64, run=64))
        worker.slow |= {f"b.g{i}.s1#2" for i in range(24)}
        await client.submit_batch(order())
        await until(lambda: run.coordinator.status().rollouts["done"] == 24)
    async with service_run(tmp_path, choice=CHOICE, attempt=2) as run, run.client() as client:
        before = {status.policy: status for status in await client.policies()}
        assert sum(status.rollouts["done"] for status in before.values()) == 24, "those of the attempt before"
        assert before["base"].reward == 10.0 and before["policy"].reward == 0.0
        await with_both(run)
        rollouts = rollouts_of(await asyncio.wait_for(client.wait_batch("b"), 20))
    assert len(rollouts) == 48 and {r.status for r in rollouts} == {Status.DONE}
    assert all(r.policy == CHOICE.resolve(ANY, r.group_id) and r.server == f"s-{r.policy}" for r in rollouts)


async def test_an_order_for_the_trained_policy_stays_on_it(tmp_path: Path) -> None:
    async with (
        service_run(tmp_path, choice=PolicyChoice(["policy", "base"], {"base": 1})) as run,
        run.client() as client,
    ):
        await with_both(run)
        await client.submit_batch(order(policy="policy"))
        assert {r.policy for r in rollouts_of(await client.wait_batch("b"))} == {"policy"}


async def test_any_waits_for_servers_of_all_that_it_may_become(tmp_path: Path) -> None:
    async with service_run(tmp_path, choice=CHOICE) as run, run.client(patience_s=0) as client:
        await run.worker()
        await run.server()
        with pytest.raises(ServiceError, match="no LLM server of policy 'base' is there") as refused:
            await client.submit_batch(order())
        assert (refused.value.status, refused.value.code) == (503, "no_servers")
        statuses = {status.policy: (status.servers, status.eligible) for status in await client.policies()}
        assert statuses == {"policy": (1, 1), "base": (0, 0)}


async def test_new_weights_go_to_the_servers_of_their_policy_alone(tmp_path: Path) -> None:
    async with service_run(tmp_path, choice=CHOICE) as run, run.client() as client:
        worker = await run.worker()
        trained = [await run.server("p0"), await run.server("p1")]
        frozen = await run.server("f0", policy="base")
        update = WeightUpdate(1, ["/w/1"])
        assert [a.server_id for a in await client.update_weights(update)] == ["p0", "p1"]
        other = WeightUpdate(1, ["/w/other"], policy="base")
        assert [server.got for server in (*trained, frozen)] == [[update], [update], []]
        await client.submit_batch(order())
        await client.wait_batch("b")
        assert set(worker.ran_on.values()) == {"p0", "p1", "f0"}, "the frozen one's old weights are its newest"
        assert [a.server_id for a in await client.update_weights(other)] == ["f0"]
        assert {s.policy: s.newest_version for s in await client.policies()} == {"policy": 1, "base": 1}
