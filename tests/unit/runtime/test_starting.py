"""What a host hears that comes back to its job."""

from __future__ import annotations

import msgspec
import pytest

from deadpool.config import Config, JobConfig
from deadpool.errors import Fenced
from deadpool.membership.records import JobClaim
from deadpool.runtime.starting import Launch, claim_token
from tests.unit.runtime.support import TOKEN, Job

CONFIG = Config(job=JobConfig(job_id="job", nnodes=2))
RETURN = Launch(run_id="", token=TOKEN, is_return=True)


def test_a_host_that_comes_back_to_its_job_has_the_same_token() -> None:
    assert claim_token(Job("a").registry, CONFIG, RETURN, "host-b") == TOKEN


def test_the_launcher_hears_the_token_of_the_job_that_was_there_first() -> None:
    heard: list[str] = []
    launch = Launch(run_id="run", token="proposed", on_token=heard.append)
    assert claim_token(Job("a").registry, CONFIG, launch, "host-b") == TOKEN
    assert heard == [TOKEN]


def test_a_host_that_comes_back_when_its_job_is_over_hears_what_to_do() -> None:
    job = Job()
    job.registry.erase()
    with pytest.raises(Fenced, match="before host host-b had come back to it; to run it again, start all"):
        claim_token(job.registry, CONFIG, RETURN, "host-b")
    assert job.registry.claim() == (None, 0)


def test_a_host_that_comes_back_under_the_id_of_another_job_hears_whose_it_is() -> None:
    job = Job()
    other = JobClaim(run_id="", token="of another job", n_members=2, claimed_by="h7, process 1")
    job.store.put(job.registry.job_key, msgspec.json.encode(other))
    with pytest.raises(Fenced, match="come back to it, and h7, process 1 has begun another"):
        claim_token(job.registry, CONFIG, RETURN, "host-b")
    assert job.registry.claim()[0] == other
