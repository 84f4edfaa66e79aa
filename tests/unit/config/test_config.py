from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deadpool.config import (
    Config,
    JobConfig,
    LivenessConfig,
    RunConfig,
    hide_secrets,
    load_config,
    settings,
)
from deadpool.config.rules import broken_rules
from deadpool.errors import ConfigError


def test_defaults_are_those_of_the_design_and_break_no_rule() -> None:
    config = load_config()
    assert config == Config()
    assert config.liveness.silence_dead_s == 3.0
    assert config.communicator.unwind_timeout_s == 30.0
    assert config.membership.lease_ttl_s == 10.0
    assert config.run.rehearse
    assert broken_rules(config) == []


def test_later_sources_win_and_every_origin_is_kept(tmp_path: Path) -> None:
    toml = tmp_path / "deadpool.toml"
    toml.write_text("[liveness]\nsilence_dead_s = 4\nsilence_suspect_s = 2\n[job]\nspares = 1\nnnodes = 5\n")
    config = load_config(
        toml=toml,
        environment={"DEADPOOL_LIVENESS_SILENCE_DEAD_S": "5.5", "DEADPOOL_JOB_NNODES": "6", "PATH": "/bin"},
        arguments={"job.nnodes": 7},
    )
    assert (config.job.nnodes, config.job.spares) == (7, 1)
    assert (config.liveness.silence_suspect_s, config.liveness.silence_dead_s) == (2.0, 5.5)
    assert config.origin("job.nnodes") == "command line --nnodes"
    assert config.origin("liveness.silence_dead_s") == "environment DEADPOOL_LIVENESS_SILENCE_DEAD_S"
    assert config.origin("liveness.silence_suspect_s") == f"{toml} [liveness] silence_suspect_s"
    assert config.origin("store.replication_factor") == "default"


def test_lists_in_the_environment_are_separated_by_commas() -> None:
    config = load_config(environment={"DEADPOOL_MEMBERSHIP_ETCD": "a:2379,b,[::1]:2379"})
    assert config.membership.etcd == ("a:2379", "b", "[::1]:2379")


def test_the_launcher_can_hand_the_whole_configuration_over_as_bytes() -> None:
    config = load_config(
        arguments={"run.script_args": ("--lr", "0.1"), "run.node_rank": 1, "membership.etcd": ("h:1",)}
    )
    copy = Config.from_bytes(config.to_bytes())
    assert copy == config
    assert copy.origins == config.origins


def test_unknown_keys_name_the_nearest_one(tmp_path: Path) -> None:
    toml = tmp_path / "deadpool.toml"
    toml.write_text("[livenes]\nx = 1\n[liveness]\nsilence_ded_s = 1\n[run]\nscript = 'x.py'\n")
    with pytest.raises(ConfigError) as caught:
        load_config(
            toml=toml,
            environment={"DEADPOOL_LIVENESS_SILENCE_DED_S": "1", "DEADPOOL_LIVNESS_SILENCE_DEAD_S": "1"},
        )
    problems = caught.value.problems
    assert len(problems) == 5
    assert "did you mean 'liveness'?" in problems[0]
    assert "did you mean 'silence_dead_s'?" in problems[1]
    assert "script" in problems[2]  # only the command line says which script runs
    assert all("did you mean 'DEADPOOL_LIVENESS_SILENCE_DEAD_S'?" in problem for problem in problems[3:])


def test_other_names_of_ours_in_the_environment_are_left_alone() -> None:
    names = ("DEADPOOL_NO_SKIP", "DEADPOOL_WORKER", "DEADPOOL_AGENT", "DEADPOOL_BUILD_EXT")
    assert load_config(environment=dict.fromkeys(names, "1")) == Config()


def test_all_problems_come_at_once_each_with_its_origin() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(
            environment={"DEADPOOL_STORE_CHUNK_BYTES": "big", "DEADPOOL_COMMUNICATOR_ABORT_TIMEOUT_S": "nan"},
            arguments={"job.nnodes": 0, "job.job_id": "a/b"},
        )
    assert str(caught.value).split("\n") == list(caught.value.problems)
    text = str(caught.value)
    assert "environment DEADPOOL_STORE_CHUNK_BYTES" in text
    assert "communicator.abort_timeout_s = nan" in text
    assert "command line --nnodes): must be at least 1" in text
    assert "command line --job-id" in text


def test_a_broken_toml_file_and_a_missing_one_are_problems(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("[job\n")
    for path in (broken, tmp_path / "absent.toml"):
        with pytest.raises(ConfigError, match="configuration file"):
            load_config(toml=path)


def test_a_password_is_never_shown() -> None:
    config = load_config(environment={"DEADPOOL_MEMBERSHIP_PASSWORD": "sesame"})
    assert config.membership.password == "sesame"
    assert not any("sesame" in line for line in config.describe())
    assert any(line.startswith("membership.password = (hidden)") for line in config.describe())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"liveness.heartbeat_interval_s": 1.1}, "three heartbeats"),
        ({"liveness.silence_suspect_s": 3.0}, "heartbeat interval < suspect < dead"),
        ({"membership.lease_ttl_s": 1.0}, "no lease shorter than 2 s"),
        ({"membership.lease_ttl_s": 30.0}, "a rebuild must wait longer"),
        ({"communicator.collective_timeout_s": 9.0}, "a collective must wait longer"),
        ({"liveness.progress_timeout_s": 600.0}, "before the culprit is named"),
        ({"communicator.close_timeout_s": 11.0}, "close <= abort <= unwind"),
        ({"job.nnodes": 1}, "another active host"),
        ({"run.node_rank": 2}, "a node rank is below"),
        ({"run.standalone": True, "membership.etcd": ("h:1",)}, "not both"),
        ({"run.standalone": True, "run.node_rank": 0}, "leave --node-rank out"),
        ({"run.respawn": True}, "only --standalone can"),
        ({"checkpoint.every": 5}, "give --checkpoint-dir"),
        ({"membership.cert": "c.pem"}, "come together"),
        ({"membership.etcd": ("a b:1",)}, "HOST or HOST:PORT"),
    ],
)
def test_rules_over_several_settings_are_checked_once_and_for_all(
    arguments: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_config(arguments=arguments)


def test_rules_hold_for_configurations_made_in_code_as_well() -> None:
    config = replace(Config(), liveness=LivenessConfig(silence_dead_s=0.5), job=JobConfig(nnodes=1))
    assert len(broken_rules(config)) == 3


def test_standalone_wins_over_an_etcd_named_in_the_environment() -> None:
    config = load_config(
        environment={"DEADPOOL_MEMBERSHIP_ETCD": "h:1"}, arguments={"run.standalone": True, "job.nnodes": 3}
    )
    assert config.run == RunConfig(standalone=True)


def test_flags_and_environment_names_are_unique_and_every_setting_is_explained() -> None:
    every = list(settings())
    flags = [setting.flag for setting in every if setting.flag]
    assert len(set(flags)) == len(flags)
    assert len({setting.environment_name for setting in every}) == len(every)
    assert all(setting.doc.endswith((".", "fault; may be repeated.")) for setting in every)


def test_limits_are_described_in_the_order_in_which_they_fire() -> None:
    config = load_config(arguments={"liveness.progress_timeout_s": 0.5})
    described = config.describe_limits()
    assert described.startswith("heartbeat_interval 0.25 s, progress_timeout 0.5 s, silence_suspect 1 s, ")
    assert described.endswith("start_timeout 300 s, collective_timeout 600 s, forming_timeout 600 s")


def test_workers_get_no_secrets_neither_in_their_configuration_nor_in_their_environment() -> None:
    environment = {"DEADPOOL_MEMBERSHIP_PASSWORD": "s3cret", "DEADPOOL_MEMBERSHIP_USER": "u", "HOME": "/"}
    config = load_config(environment=environment)
    assert b"s3cret" in config.to_bytes()
    assert b"s3cret" not in config.without_secrets().to_bytes()
    assert hide_secrets(environment) == {"DEADPOOL_MEMBERSHIP_USER": "u", "HOME": "/"}
