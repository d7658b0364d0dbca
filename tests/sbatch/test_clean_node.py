"""sbatch/clean_node.sh, which root runs at the end of every job: it removes what dead runs left, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from prorl_hpc.slurm.private.base import PrivateSlurm, missing
from prorl_hpc.slurm.private.opening import start_cluster
from prorl_hpc.slurm.private.shape import Shape
from prorl_hpc.slurm.process_identity import ProcessIdentity

SCRIPT = Path(__file__).resolve().parents[2] / "sbatch" / "clean_node.sh"
SOMEBODY, SOMEBODY_ELSE = 65534, 65533


@pytest.fixture
def node_tmp() -> Iterator[Path]:
    """A /tmp of its own that every user can reach; pytest's own directories are closed to others."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="clean-node-") as place:
        Path(place).chmod(0o1777)
        yield Path(place)


def clean(*roots: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(SCRIPT), *map(str, roots)], capture_output=True, text=True, env={**os.environ, **environment}, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def dead_process() -> dict[str, str]:
    """What `owner` says of a process that is over."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        return ProcessIdentity.of(process.pid).words()


def this_process() -> dict[str, str]:
    return ProcessIdentity.of(os.getpid()).words()


def leave(root: Path, digest: str = "0a1b2c3d4e", uid: int | None = None, **owner: object) -> Path:
    """What a supervisor leaves that was killed."""
    uid = os.getuid() if uid is None else uid
    path = root / f"prorl-{uid}-{digest}"
    path.mkdir(mode=0o700)
    lines = {"run": "run-abc123", "path": "/shared/runs/run-abc123", "job": "", **dead_process(), **owner}
    (path / "owner").write_text("".join(f"{key}={value}\n" for key, value in lines.items()))
    (path / "sandboxes" / "one").mkdir(parents=True)
    (path / "sandboxes" / "one" / "file").write_text("x")
    if uid != os.getuid():
        for each in (path, *path.rglob("*")):
            os.chown(each, uid, uid)
    return path


def test_what_a_dead_run_left_is_removed(node_tmp: Path) -> None:
    left = leave(node_tmp)
    (left / "closed").mkdir(mode=0)
    said = clean(node_tmp)
    assert f"removed {left} of run run-abc123" in said
    assert not left.exists()


def test_shared_memory_of_the_same_name_goes_too(node_tmp: Path) -> None:
    left = leave(node_tmp, digest=f"{os.getpid():010x}")
    shared = Path("/dev/shm") / left.name
    shared.mkdir(mode=0o700)
    (shared / "weights").write_bytes(b"0" * 1000)
    clean(node_tmp)
    assert not left.exists() and not shared.exists()


def test_what_lives_is_left_alone(node_tmp: Path) -> None:
    by_pid = leave(node_tmp, "aaaaaaaaaa", **this_process())
    by_run = leave(node_tmp, "bbbbbbbbbb", run="run-that-lives")
    by_job = leave(node_tmp, "cccccccccc", job=4711)
    dead = leave(node_tmp, "dddddddddd", job=4712)
    marks = ({"PRORL_RUN_ID": "run-that-lives"}, {"SLURM_JOB_ID": "4711"})
    living = [subprocess.Popen(["sleep", "100"], env={**os.environ, **mark}) for mark in marks]
    try:
        # The ending job's own id is in the environment of its Epilog: that is no sign of life.
        clean(node_tmp, SLURM_JOB_ID="4712")
    finally:
        for process in living:
            process.kill()
            process.wait()
    assert by_pid.exists() and by_run.exists() and by_job.exists()
    assert not dead.exists()


def test_a_process_is_told_from_a_later_one_and_from_those_of_other_places(node_tmp: Path) -> None:
    me = this_process()
    recycled = leave(node_tmp, "aaaaaaaaaa", **{**me, "started": int(me["started"]) - 1})
    before_reboot = leave(node_tmp, "bbbbbbbbbb", boot="0-0", **{"pidns": 0xEFFFFFFC})
    elsewhere = [
        leave(node_tmp, "cccccccccc", pidns=17),
        leave(node_tmp, "dddddddddd", boot="0-0", host="elsewhere"),
        leave(node_tmp, "eeeeeeeeee", boot="0-0", machine="other"),
        leave(node_tmp, "ffffffffff", boot="", started=0),
    ]
    clean(node_tmp)
    assert not recycled.exists()
    outside_containers = Path("/proc/self/ns/pid").stat().st_ino == 0xEFFFFFFC and me["machine"] != ""
    assert before_reboot.exists() != outside_containers
    assert [path for path in elsewhere if not path.exists()] == []


def edited(place: Path, **settings: str) -> Path:
    """A copy of the script with other values of its variables."""
    copy = place / "clean_node.sh"
    lines = SCRIPT.read_text().splitlines(keepends=True)
    names = {f"{name}=": f"{name}={value}\n" for name, value in settings.items()}
    copy.write_text("".join(next((new for old, new in names.items() if line.startswith(old)), line) for line in lines))
    copy.chmod(0o755)
    return copy


@pytest.mark.parametrize(
    ("limits", "said"),
    [({"total_s": "2"}, "not done after 2 s"), ({"directory_s": "2"}, "could not remove all of")],
    ids=["of-all", "of-one-directory"],
)
def test_what_hangs_ends_at_its_deadline(node_tmp: Path, limits: dict[str, str], said: str) -> None:
    programs = node_tmp / "bin"
    programs.mkdir()
    (programs / "rm").write_text(f"#!/bin/sh\necho $$ >>{node_tmp}/started\nexec sleep 600\n")
    (programs / "rm").chmod(0o755)
    (node_tmp / "started").touch()  # on a slow machine the time may be over before
    left = leave(node_tmp)
    copy = edited(node_tmp, path=f"{programs}:/usr/bin:/bin", **limits)
    done = subprocess.run([str(copy), str(node_tmp)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert said in done.stdout
    assert left.exists()
    assert [pid for pid in (node_tmp / "started").read_text().split() if Path(f"/proc/{pid}").exists()] == []


@pytest.mark.skipif(os.getuid() != 0, reason="plays several users, which needs root")
def test_the_group_of_a_directory_lends_no_rights(node_tmp: Path) -> None:
    left = leave(node_tmp, uid=SOMEBODY)
    roots = left / "roots"
    roots.mkdir()
    (roots / "file").write_text("in a directory that the group of root may write to")
    roots.chmod(0o770)
    os.chown(left, SOMEBODY, 0)
    said = clean(node_tmp)
    assert "could not remove all of" in said
    assert (roots / "file").exists()


def test_what_it_cannot_place_is_left_alone(node_tmp: Path) -> None:
    kept = [
        leave(node_tmp, "aaaaaaaaaa", pid="1; rm -rf /"),
        leave(node_tmp, "bbbbbbbbbb", run="*"),
        leave(node_tmp, "cccccccccc"),
        leave(node_tmp, "eeeeeeeeee"),
        node_tmp / "prorl-0-nothexadecimal",
        node_tmp / "prorl-0-",
        node_tmp / "somebody's",
    ]
    (kept[2] / "owner").unlink()  # not written yet
    kept[3].chmod(0o755)
    for path in kept[4:]:
        path.mkdir(mode=0o700)
        (path / "owner").write_text(
            "".join(f"{key}={value}\n" for key, value in {"run": "x", **dead_process()}.items())
        )
    clean(node_tmp)
    assert [path for path in kept if not path.exists()] == []


@pytest.mark.skipif(os.getuid() != 0, reason="plays several users, which needs root")
def test_links_lead_root_nowhere(node_tmp: Path) -> None:
    precious = node_tmp / "precious"
    precious.mkdir(mode=0o755)
    (precious / "file").write_text("root's")
    # A link in place of a directory, one in place of the file `owner`, one inside; a directory of another uid than named.
    link = node_tmp / f"prorl-{SOMEBODY}-aaaaaaaaaa"
    link.symlink_to(leave(precious, "bbbbbbbbbb", uid=SOMEBODY))
    os.chown(link, SOMEBODY, SOMEBODY, follow_symlinks=False)
    no_owner = leave(node_tmp, "cccccccccc", uid=SOMEBODY)
    (no_owner / "owner").unlink()
    secret = precious / "secret"
    secret.write_text("".join(f"{key}={value}\n" for key, value in {"run": "secret", **dead_process()}.items()))
    secret.chmod(0o600)
    (no_owner / "owner").symlink_to(secret)
    inside = leave(node_tmp, "dddddddddd", uid=SOMEBODY)
    (inside / "out").symlink_to(precious)
    false_name = leave(node_tmp, "eeeeeeeeee", uid=SOMEBODY)
    os.chown(false_name, SOMEBODY_ELSE, SOMEBODY_ELSE)
    said = clean(node_tmp)
    assert link.is_symlink() and (precious / f"prorl-{SOMEBODY}-bbbbbbbbbb" / "owner").exists()
    assert no_owner.exists() and "secret" not in said
    assert not inside.exists() and (precious / "file").read_text() == "root's"
    assert false_name.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="plays several users, which needs root")
def test_root_removes_with_the_rights_of_the_owner_alone(node_tmp: Path) -> None:
    left = leave(node_tmp, uid=SOMEBODY)
    others = left / "others"
    others.mkdir(mode=0o700)
    (others / "file").write_text("another user's, moved here by the owner")
    os.chown(others, SOMEBODY_ELSE, SOMEBODY_ELSE)
    said = clean(node_tmp)
    assert "could not remove all of" in said
    assert (others / "file").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="plays several users, which needs root")
def test_users_clean_what_is_theirs(node_tmp: Path) -> None:
    theirs, others = leave(node_tmp, uid=SOMEBODY), leave(node_tmp, uid=SOMEBODY_ELSE)
    words = ["setpriv", f"--reuid={SOMEBODY}", f"--regid={SOMEBODY}", "--clear-groups"]
    copy = node_tmp / "clean_node.sh"
    copy.write_bytes(SCRIPT.read_bytes())
    copy.chmod(0o755)
    done = subprocess.run([*words, str(copy), str(node_tmp)], capture_output=True, text=True, cwd="/", timeout=60)
    assert done.returncode == 0, done.stderr
    assert not theirs.exists() and others.exists()


# A supervisor of a run: makes its directory as the real one does, and is killed with its job.
SUPERVISOR = """
import os, sys, time
from pathlib import Path
from prorl_hpc.slurm.process_identity import ProcessIdentity
path = Path("/tmp") / f"prorl-{os.getuid()}-{sys.argv[1]}"
path.mkdir(mode=0o700, exist_ok=True)
owner = {"run": os.environ["PRORL_RUN_ID"], "path": "/x", "job": os.environ["SLURM_JOB_ID"]}
owner |= ProcessIdentity.of(os.getpid()).words()
(path / "owner").write_text("".join(f"{key}={value}\\n" for key, value in owner.items()))
(Path(sys.argv[2]) / f"up-{os.environ['SLURM_JOB_ID']}-{os.environ['SLURMD_NODENAME']}").touch()
time.sleep(600)
"""


@pytest.fixture
def with_epilog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateSlurm]:
    if reason := missing("namespaced"):
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("epilog")
    shares = [str(directory), str(SCRIPT.parents[1]), sys.prefix, sys.base_prefix]
    settings = {"Epilog": str(SCRIPT), "Prolog": str(SCRIPT), "PrologFlags": "Alloc"}
    shape = Shape(kind="namespaced", cpu_nodes=1, gpu_nodes=1, kill_wait_s=1, share=shares, settings=settings)
    cluster = start_cluster(directory, shape)
    yield cluster
    cluster.stop()


def runtime_dirs(cluster: PrivateSlurm, node: str) -> str:
    return cluster.run(["sh", "-c", "cd /tmp && ls -d prorl-*"], node=node).stdout.strip()


@pytest.mark.slurm
def test_as_epilog_it_cleans_every_component_and_no_other_job(with_epilog: PrivateSlurm) -> None:
    cluster, here = with_epilog, with_epilog.shared
    (here / "supervisor.py").write_text(SUPERVISOR)
    script = here / "job.sh"
    script.write_text(
        "#!/bin/bash\n#SBATCH -p cpu -N1 -n1 --mem=100\n#SBATCH hetjob\n#SBATCH -p gpu -N1 -n1 --mem=100\n"
        f'PRORL_RUN_ID=run-$1 exec srun --het-group=0,1 {sys.executable} {here}/supervisor.py "$1" {here}\n'
    )

    def submit(digest: str) -> str:
        done = cluster.run(["sbatch", "--parsable", "--no-requeue", f"--output={here}/%j.out", str(script), digest])
        assert done.returncode == 0, done.stderr
        job = done.stdout.strip()
        wait_for(lambda: len(list(here.glob(f"up-{job}-*"))) == 2)
        return job

    first, second = submit("aaaaaaaaaa"), submit("bbbbbbbbbb")
    for node in ("cpu01", "gpu01"):
        assert runtime_dirs(cluster, node).split() == ["prorl-0-aaaaaaaaaa", "prorl-0-bbbbbbbbbb"]
    cluster.run(["scancel", first])
    for node in ("cpu01", "gpu01"):
        wait_for(lambda node=node: runtime_dirs(cluster, node) == "prorl-0-bbbbbbbbbb")
    assert cluster.run(["squeue", "-h", "-t", "RUNNING", "-o", "%i"]).stdout.split() == [f"{second}+0", f"{second}+1"]
    cluster.run(["scancel", second])
    for node in ("cpu01", "gpu01"):
        wait_for(lambda node=node: runtime_dirs(cluster, node) == "")
    assert set(cluster.states().values()) <= {"idle", "completing"}


def wait_for(reached, timeout_s: float = 40.0) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + timeout_s
    while not reached():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.1)
