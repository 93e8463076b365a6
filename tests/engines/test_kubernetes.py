"""``agn-optax launch run.toml --on kubernetes``: manifests; pods run as processes."""

import contextlib
import copy
import functools
import os
import pathlib
import re
import socket
import stat
import time

import kubernetes_validate
import pytest
import yaml
from helpers.commands import ROOT, command, fails, succeeds
from helpers.pods import KUBECTL, LIMIT, Cluster, IndexedJob, ended
from helpers.waiting import wait_until

from agn_optax import errors, service

# The oldest version with all fields used, and the newest with a schema here.
VERSIONS = ("1.31", kubernetes_validate.latest_version())


def run(center="", kubernetes="", top="", rule='rule = "downpour"', more=""):
    return f"""
program = "train.py"
workers = 3
name = "digits"
restarts = 2
{top}
[rule]
{rule}
[center]
{center}
[kubernetes]
image = "registry.example/digits:1"
{kubernetes}
{more}
"""


ALL = """namespace = "team"
storage-class = "fast"
storage-size = "50Gi"
gpu = "nvidia.com/mig"
"""
NEEDS = "[resources.worker]\nmemory = '2GiB'\ngpus = 4\ncpus = 8\nseconds = 3600\n"
FORMS = {
    "plain": run(),
    "in the open": run("open = true\ninsecure = true"),
    "tokens in plain text": run("insecure = true"),
    "everything": run("page = true", ALL, "storage = '/kept'", more=NEEDS),
    "one way": run("direct = false"),
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(params=FORMS)
def form(request):
    return FORMS[request.param]


@functools.cache
def printed(text):
    """Return the files of a dry run by their names, and the commands."""
    pathlib.Path("run.toml").write_text(text)
    output = succeeds("launch", "run.toml", "--on", "kubernetes", "--dry-run")
    files, _, commands = output.partition("# Commands\n")
    parts = re.split(r"^# (\w+\.\w+)\n", files, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True)), commands.splitlines()


def objects(text):
    return copy.deepcopy(loaded(text))


@functools.cache
def loaded(text):
    return [
        each
        for name, file in printed(text)[0].items()
        if name.endswith(".yaml")
        for each in yaml.safe_load_all(file)
    ]


def one(made, kind):
    (found,) = [each for each in made if each["kind"] == kind]
    return found


def templates(made):
    """Yield each workload with its pod template."""
    for each in made:
        if each["kind"] in ("StatefulSet", "Job"):
            yield each, each["spec"]["template"]


def containers(template):
    spec = template["spec"]
    return [*spec.get("initContainers", ()), *spec["containers"]]


@pytest.fixture
def schemas(monkeypatch):
    """Cache the schemas, which are large."""
    monkeypatch.setattr(kubernetes_validate.utils, "schema_contents", schema)


schema = functools.cache(kubernetes_validate.utils.schema_contents)


@pytest.mark.usefixtures("schemas")
@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_match_the_schemas_of_kubernetes(form, version):
    for each in objects(form):
        kubernetes_validate.validate(each, version, strict=True)


def test_schemas_reject_unknown_fields():
    job = one(objects(FORMS["plain"]), "Job")
    job["spec"]["template"]["spec"]["containers"][0]["comand"] = []
    with pytest.raises(kubernetes_validate.ValidationError, match="comand"):
        kubernetes_validate.validate(job, VERSIONS[-1], strict=True)


def test_every_reference_in_the_manifests_exists(form):
    made = objects(form)
    files, commands = printed(form)
    known = {(each["kind"], each["metadata"]["name"]) for each in made}
    secrets = set(
        re.findall(
            r" create (?:--namespace=team )?secret generic (\S+)",
            files.get("secrets.sh", ""),
            re.M,
        )
    )
    labels = [template["metadata"]["labels"] for _, template in templates(made)]
    for each in made:
        selector = each["spec"].get("selector") if "spec" in each else None
        if selector:
            wanted = selector.get("matchLabels", selector).items()
            assert sum(wanted <= own.items() for own in labels) == 1
    for _, template in templates(made):
        volumes = {}
        for each in template["spec"]["volumes"]:
            volumes[each["name"]] = each
            if "secret" in each:
                assert each["secret"]["secretName"] in secrets
            if "persistentVolumeClaim" in each:
                claim = each["persistentVolumeClaim"]["claimName"]
                assert ("PersistentVolumeClaim", claim) in known
        for container in containers(template):
            mounts = container.get("volumeMounts", [])
            assert {each["name"] for each in mounts} <= set(volumes)
            for each in container.get("envFrom", ()):
                assert ("ConfigMap", each["configMapRef"]["name"]) in known
    for name in files:
        assert sum(name in line for line in commands) == 1


def test_pods_run_with_least_privileges(form):
    for _, template in templates(objects(form)):
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        for container in containers(template):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


@pytest.mark.parametrize("name", ["plain", "one way", "everything"])
def test_center_has_its_options_storage_probes_and_ports(name):
    made = objects(FORMS[name])
    center = next(template for _, template in templates(made))["spec"]
    (container,) = center["containers"]
    command = " ".join(container["command"])
    assert "--address=0.0.0.0:5000" in command
    assert ("--direct-address=0.0.0.0:5001" in command) == (name != "one way")
    storage = "/kept" if name == "everything" else "/storage"
    assert f"--journal={storage}/journal" in command
    assert storage in [each["mountPath"] for each in container["volumeMounts"]]
    # The pod is not killed before the service has ended by itself.
    assert center["terminationGracePeriodSeconds"] > service.DEFAULT_GRACE + 1
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert f"--address=0.0.0.0:{container[probe]['tcpSocket']['port']}" in command
    # It has the time to read its journal before the probe fails.
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 600
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    service_of_it = one(made, "Service")["spec"]
    for each in service_of_it["ports"]:
        assert ports[each["targetPort"]] == each["port"]
    assert ("page" in ports) == (name == "everything")
    # Its name resolves to the pod's address, also before the pod is ready.
    assert service_of_it["clusterIP"] == "None"
    assert service_of_it["publishNotReadyAddresses"] is True


def test_worker_gets_its_resources():
    spec = one(objects(FORMS["everything"]), "Job")["spec"]
    assert spec["activeDeadlineSeconds"] == 3600
    (container,) = spec["template"]["spec"]["containers"]
    memory = str(2 << 30)
    assert container["resources"] == {
        "requests": {"cpu": "8", "memory": memory, "nvidia.com/mig": "4"},
        "limits": {"memory": memory, "nvidia.com/mig": "4"},
    }


def test_center_has_default_resource_requests():
    def resources(text):
        center = next(template for _, template in templates(objects(text)))["spec"]
        return center["containers"][0]["resources"]

    least = {"requests": {"cpu": "1", "memory": "2Gi"}}
    assert resources(FORMS["plain"]) == least
    memory = str(3 << 30)
    made = resources(run(more="[resources.center]\nmemory = '3GiB'\n"))
    requests = {"cpu": "1", "memory": memory}
    assert made == {"requests": requests, "limits": {"memory": memory}}


def test_center_that_is_told_to_end_is_restarted():
    template = one(objects(FORMS["plain"]), "StatefulSet")["spec"]["template"]
    assert template["spec"].get("restartPolicy", "Always") == "Always"


def test_failure_of_a_worker_ends_no_other_worker():
    worker = one(objects(FORMS["plain"]), "Job")["spec"]
    assert worker["backoffLimitPerIndex"] == 2
    assert worker["podFailurePolicy"]["rules"][0]["action"] == "Ignore"
    assert worker["podReplacementPolicy"] == "Failed"
    assert worker["template"]["spec"]["restartPolicy"] == "Never"


def container_environment(made, annotations):
    """Return the environment of the workers' pods."""
    template = list(templates(made))[-1][1]
    (container,) = template["spec"]["containers"]
    cluster = Cluster(pathlib.Path(), made, None)
    return cluster.variables(template["spec"], container, annotations)


@pytest.fixture
def environment(monkeypatch):
    def environment(variables):
        for name in [each for each in os.environ if each.startswith("AGN_OPTAX_")]:
            monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return service.environment()

    return environment


def test_pods_of_a_job_know_their_rank_and_restarts(environment):
    made = objects(FORMS["plain"])
    for index in range(3):
        found = {"batch.kubernetes.io/job-completion-index": str(index)}
        failures = {"batch.kubernetes.io/job-index-failure-count": "2"} if index else {}
        # The Job controller sets this.
        own = {"JOB_COMPLETION_INDEX": str(index)}
        me = environment(container_environment(made, found | failures) | own)
        assert (me.rank, me.workers, me.worker) == (index, 3, f"worker-{index}")
        assert me.restarts == (2 if index else 0)
        assert me.address == "digits-center:5000"
        assert me.distributed == {}
        assert me.rule.name == "downpour"


@pytest.mark.parametrize(
    ("form", "changed"),
    [
        ("plain", {"ConfigMap", "Job", "StatefulSet"}),
        ("in the open", {"ConfigMap", "Job"}),
    ],
)
def test_more_workers_leave_running_workers_and_restart_a_center_with_tokens(
    form, changed
):
    few, more = (objects(FORMS[form].replace("= 3", n)) for n in ("= 3", "= 9"))
    job, larger = one(few, "Job")["spec"], one(more, "Job")["spec"]
    assert larger["completions"] == larger["parallelism"] == 9
    assert job["template"] == larger["template"]
    assert one(more, "ConfigMap")["data"]["AGN_OPTAX_WORKERS"] == "9"
    pairs = zip(few, more, strict=True)
    assert {before["kind"] for before, after in pairs if before != after} == changed


def test_environment_values_are_not_expanded():
    text = FORMS["plain"].replace("restarts", 'environment = {A = "$(B) $$"}\nrestarts')
    assert container_environment(objects(text), {})["A"] == "$(B) $$"


def test_arguments_of_commands_are_not_expanded():
    """Kubernetes would replace $$ by $, and $(NAME) by the variable's value."""
    words = ["--pattern=$(HOME)/*.py", "--price=5$$"]
    top = f"arguments = {words}\nrestarts"
    made = objects(FORMS["plain"].replace("restarts", top))
    *_, worker = (template["spec"] for _, template in templates(made))
    command = worker["containers"][0]["command"]
    assert [word.replace("$$", "$") for word in command[-2:]] == words
    assert not re.search(r"(?<!\$)(\$\$)*\$\(", " ".join(command))


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (run().replace("image", "imag"), "(did you mean 'image'?)"),
        (re.sub("image.*", "", run()), "must have an image"),
        (run().replace('"digits"', '"1st"'), "begin with a letter, got '1st'"),
        (
            run(more="[resources.worker]\nprocesses = 2"),
            "got processes = 2 on Kubernetes: a worker is one process on this machine",
        ),
        (run(top="storage = 'kept'"), "an absolute path, got 'kept'"),
        (run("address = '0.0.0.0:1'"), "address cannot be set on Kubernetes"),
        (run("address-file = 'it'"), "address-file cannot be set on"),
        (run("open = true"), "needs insecure = true"),
        (run(top="tls-ca = 'ca.pem'"), "tls-ca cannot be set on Kubernetes"),
        (run(kubernetes="queue = 'gpus'"), "unknown key 'queue'"),
    ],
)
def test_bad_run_files_are_rejected_before_anything_is_submitted(text, message):
    pathlib.Path("run.toml").write_text(text)
    wrong = fails("launch", "run.toml", "--on", "kubernetes", code=2)
    assert message in " ".join(wrong.split())
    assert not pathlib.Path("digits-kubernetes").exists()


def test_missing_kubectl_is_reported(monkeypatch):
    pathlib.Path("run.toml").write_text(FORMS["plain"])
    monkeypatch.setenv("PATH", "")
    output = fails("launch", "run.toml", "--on", "kubernetes", code=2)
    assert "kubectl cannot be found" in output
    assert not pathlib.Path("digits-kubernetes").exists()


@pytest.fixture
def kubectl(here, monkeypatch):
    """A stand-in for kubectl that submits to a folder."""
    folder = here / "cluster"
    folder.mkdir()
    program = here / "bin" / "kubectl"
    program.parent.mkdir()
    program.write_text(KUBECTL)
    program.chmod(0o755)
    monkeypatch.setenv("CLUSTER", str(folder))
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return program


def test_files_are_written_and_submitted(here, kubectl):
    (here / "run.toml").write_text(FORMS["in the open"])
    output = succeeds("launch", "run.toml", "--on", "kubernetes")
    assert "kubectl apply --filename=center.yaml" in output
    names = sorted(each.name for each in (here / "digits-kubernetes").iterdir())
    assert names == ["center.yaml", "storage.yaml", "workers.yaml"]
    assert sorted(each.name for each in (here / "cluster").iterdir()) == names


def test_patches_of_the_guide_fit_the_manifests(here, kubectl):
    (text,) = re.findall(
        r"```yaml\n(.*?)```", (ROOT / "docs/kubernetes.md").read_text(), re.S
    )
    kustomization = yaml.safe_load(text)
    made = objects(FORMS["in the open"])
    for patch in kustomization["patches"]:
        target = one(made, patch["target"]["kind"])
        for each in yaml.safe_load(patch["patch"]):
            *path, last = each["path"].strip("/").split("/")
            assert each["op"] == "add"
            place = target
            for key in path:
                place = place[int(key) if isinstance(place, list) else key]
            if isinstance(place, list):
                assert last == "-"
                place.append(each["value"])
            else:
                place[last] = each["value"]
    for each in made:
        kubernetes_validate.validate(each, VERSIONS[-1], strict=True)

    folder = here / "digits-kubernetes"
    folder.mkdir()
    (folder / "kustomization.yaml").write_text(text)
    _, commands = printed(FORMS["in the open"] + "\n")
    assert commands == ["kubectl apply --kustomize=."]
    assert set(kustomization["resources"]) == set(printed(FORMS["in the open"])[0])


def test_failure_of_kubectl_is_reported_once(here, kubectl):
    kubectl.write_text("#!/bin/sh\necho 'no such cluster' >&2\nexit 3\n")
    (here / "run.toml").write_text(FORMS["in the open"])
    result = command("launch", "run.toml", "--on", "kubernetes")
    assert result.exit_code == 3
    assert result.output.count("no such cluster") == 1  # and nothing comes after


TRAIN = """
import pathlib, time, jax.numpy as jnp, optax, agn_optax
from agn_optax import service

me = service.environment()
print("restarts", me.restarts, flush=True)
with service.connect(me.address, me.rule) as center:
    worker = agn_optax.Worker(center, optax.sgd(1.0), period=1, name=me.worker)
    params, state = worker.start(jnp.zeros(me.workers), chief=me.rank == 0)
    mine = -(jnp.arange(me.workers) == me.rank).astype(jnp.float32)
    step = 0
    while not pathlib.Path("enough").exists():
        updates, state = worker.tx.update(mine, state, params)
        params, state = worker.exchange(optax.apply_updates(params, updates), state)
        step += 1
        print("made", step, flush=True)
        time.sleep(0.05)
    worker.flush(params, state)
"""


@pytest.mark.slow
def test_run_survives_kills_of_its_pods(here, kubectl):
    """The manifests run as processes, and every step counts once despite kills."""
    (here / "run.toml").write_text(FORMS["plain"].replace("workers = 3", "workers = 2"))
    (here / "train.py").write_text(TRAIN)
    text = succeeds("launch", "run.toml", "--on", "kubernetes")
    assert text.count("kubectl apply --filename") == 3
    folder, keys = here / "cluster", here / "digits-kubernetes" / "keys"
    files = list(folder.glob("*.yaml"))
    made = [each for file in files for each in yaml.safe_load_all(file.read_text())]

    # The files have no secrets, and each pod has only the secrets that it needs.
    secrets = {path.name for path in (folder / "secrets" / "digits-workers").iterdir()}
    assert not {"ca.key", "center.key", "tokens", "operator.token"} & secrets
    secrets = {path.name for path in (folder / "secrets" / "digits-center").iterdir()}
    assert secrets == {"ca.pem", "center.pem", "center.key", "tokens"}
    for path in [*keys.glob("*.token"), *keys.glob("*.key")]:
        assert not any(path.read_text().strip() in file.read_text() for file in files)
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077

    # Another launch makes the missing keys, and keeps all others.
    before = {path: path.read_bytes() for path in keys.iterdir()}
    more = command("launch", "run.toml", "--on", "kubernetes", "--workers=3")
    assert more.exit_code == 0, more.output
    assert (folder / "secrets" / "digits-workers" / "worker-2.token").exists()
    assert all(path.read_bytes().startswith(was) for path, was in before.items())

    with contextlib.ExitStack() as stack:
        _run(stack, Cluster(folder, made, here, [5000, 5001]), keys)


def _run(stack, cluster, keys):
    center = cluster.object("StatefulSet", "digits-center")["spec"]["template"]["spec"]
    (container,) = center["containers"]
    probed = cluster.ports[str(container["livenessProbe"]["tcpSocket"]["port"])]

    def start():
        process = cluster.start(center, container)
        stack.callback(process.wait)
        stack.callback(process.kill)
        return process

    def is_live():
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", int(probed)), 10).close()
            return True
        return False

    files = (keys / "ca.pem", keys / "operator.pem", keys / "operator.key")
    observer = stack.enter_context(
        service.Observer(
            f"localhost:{cluster.ports['5000']}",
            tls=service.tls(*files),
            token=keys / "operator.token",
        )
    )

    def version():
        job.check()
        time.sleep(0.1)  # the center limits the rate of calls
        with contextlib.suppress(errors.CenterError):
            return observer.status()["version"] or 0
        return 0

    def exceeds(before):
        """Return the counts of all workers once each is greater; None before that."""
        job.check()
        time.sleep(0.1)  # as in `version`
        with contextlib.suppress(errors.CenterError):
            counts = observer.pull().params
            return counts if (counts > before).all() else None
        return None

    # Workers start first, and wait for the center.
    job = IndexedJob(cluster, cluster.object("Job", "digits-workers"))
    stack.callback(job.close)
    assert not is_live()
    process = start()
    wait_until(is_live, LIMIT)
    wait_until(lambda: version() >= 10, LIMIT)
    process.kill()
    process.wait()
    assert not is_live()
    process = start()
    wait_until(is_live, LIMIT)
    assert version() >= 10
    # Both are back: a worker that is not makes steps that reach no center.
    had = []
    wait_until(lambda: had.append(exceeds(0)) or had[-1] is not None, LIMIT)
    wait_until(lambda: exceeds(had[-1]) is not None, LIMIT)
    job.kill(1)
    second = lambda: job.output_files[1].read_text().partition("restarts 1")[2]  # noqa: E731
    wait_until(lambda: "made" in second(), LIMIT)
    (cluster.workdir / "enough").touch()
    job.wait()
    assert job.succeeded == {0, 1}
    assert job.failures == {0: 0, 1: 1}

    # Every step counts once; the message in flight at the kill may count or not.
    counts = observer.pull().params.tolist()
    runs = [
        [
            int(re.findall(r"made (\d+)", run)[-1])
            for run in output.split("restarts")[1:]
        ]
        for output in (path.read_text() for path in job.output_files.values())
    ]
    assert [len(each) for each in runs] == [1, 2]
    assert counts[0] == sum(runs[0])
    assert sum(runs[1]) <= counts[1] <= sum(runs[1]) + 1
    assert ended(process) == 0
    assert not is_live()
