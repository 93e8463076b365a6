"""The migration guides (coming-from pages): every line runs, and no API is missing.

In tables with a column "here", the code at the head of each cell of that column runs,
in order, after the ``py`` blocks before it. All code of a section (``##``) has one
scope.
"""

import contextlib
import io
import pathlib
import re
import shlex
import tempfile
import threading

import numpy as np
import optax
import pytest
from helpers import commands
from helpers.waiting import wait_until

import agn_optax

pytestmark = pytest.mark.slow

DOCS = pathlib.Path(__file__).parents[1] / "docs"
PAGES = sorted(DOCS.glob("coming-from-*.md"))
FENCE = re.compile(r"```(\S+)( \S+)?\n(.*?)```", re.DOTALL)
ROW = re.compile(r"\| (?P<there>[^|]*) \| (?P<here>[^|]*) \|")
TENSORFLOW = "coming-from-tensorflow.md"

# The original APIs: sections of the page, and the names that each must have.
OF_OPTIMIZERS = (
    "minimize compute_gradients apply_gradients global_step use_locking name"
)
OF_HOOKS = "get_init_op make_session_run_hook is_chief task_index"
ORIGINALS = {
    "AGNOptimizer": f"""
        AGNOptimizer optimizer num_worker custom_getter communication_period
        {OF_OPTIMIZERS} {OF_HOOKS} grads_and_vars loss
        AGNCustomGetter worker_device partitioner reuse grad_variable
        global_center_variable""",
    "ElasticAverageOptimizer": f"""
        ElasticAverageOptimizer opt num_worker ea_custom_getter communication_period
        moving_rate rho synchronous BETA {OF_OPTIMIZERS} {OF_HOOKS} swapping_saver
        var_list kwargs ElasticAverageCustomGetter worker_device local_center_variable
        global_center_variable""",
    "ModelAverageOptimizer": """
        ModelAverageOptimizer opt num_worker is_chief ma_custom_getter interval_steps
        use_locking name compute_gradients apply_gradients global_step get_init_op
        make_session_run_hook ModelAverageCustomGetter worker_device
        global_center_variable""",
    "Optimizer": f"""
        {OF_OPTIMIZERS} loss var_list gate_gradients GATE_NONE GATE_OP GATE_GRAPH
        aggregation_method colocate_gradients_with_ops grad_loss grads_and_vars get_name
        get_slot get_slot_names variables constraint None IndexedSlices""",
    "Cluster and session": """
        ClusterSpec TF_CONFIG Server job_name task_index target join is_chief
        replica_device_setter ps_tasks ps_device worker_device merge_devices cluster
        ps_ops ps_strategy MonitoredTrainingSession master checkpoint_dir scaffold hooks
        chief_only_hooks save_checkpoint_secs save_summaries_steps save_summaries_secs
        config stop_grace_period_secs log_step_count_steps max_wait_secs
        save_checkpoint_steps summary_dir save_graph_def should_stop run""",
    "replicate_model_fn and TowerOptimizer": """
        replicate_model_fn model_fn loss_reduction devices SUM NONE
        SUM_BY_NONZERO_WEIGHTS features labels TRAIN EVAL PREDICT eval_metric_ops
        predictions export_outputs TowerOptimizer optimizer_or_optimizer_fn
        has_been_used get_slot get_slot_names get_name variables compute_gradients
        apply_gradients minimize global_step""",
    "VariableMgr": """
        VariableMgr VariableMgrIndependent VariableMgrLocalFetchFromPS
        VariableMgrLocalFetchFromStagedPS VariableMgrLocalReplicated
        VariableMgrDistributedAllReduce VariableMgrCollectiveAllReduce
        VariableMgrDistributedFetchFromPS VariableMgrDistributedFetchFromStagedPS
        VariableMgrDistributedReplicated each_tower_has_variables supports_staged_vars
        create_outer_variable_scope preprocess_device_grads get_gradients_to_apply
        append_apply_gradients_ops get_post_init_ops get_devices savable_variables
        trainable_variables_on_device reuse_variables all_reduce_spec
        agg_small_grads_max_bytes agg_small_grads_max_group allreduce_merge_scope
        gradient_repacking compact_gradient_transfer variable_consistency
        enable_auto_loss_scale job_name num_workers num_gpus task_id
        use_resource_vars""",
}


def parts(page):
    """Return the sections of a page by their titles."""
    pieces = re.split(r"^## (.*)\n", (DOCS / page).read_text(), flags=re.MULTILINE)
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


def code(part):
    """Yield the code that runs, in order: blocks and cells of tables."""
    place = 0
    for fence in [*FENCE.finditer(part), None]:
        end = len(part) if fence is None else fence.start()
        is_table = False
        for line in part[place:end].splitlines():
            if re.fullmatch(r"\| .* \| here \|", line):
                is_table = True
            elif not line.startswith("|"):
                is_table = False
            elif is_table:
                here = ROW.fullmatch(line)["here"].partition("<br>")[0]
                if found := re.fullmatch(r"`([^`]*)`", here):
                    yield found[1]
                else:
                    assert here in ("nothing", "---"), line
        if fence is None:
            return
        place = fence.end()
        if fence[1] == "py" and not fence[2]:
            yield fence[3]


PARTS = [
    pytest.param(page.name, title, id=f"{page.stem}-{title}")
    for page in PAGES
    for title, part in parts(page.name).items()
    if any(code(part))
]


@pytest.mark.parametrize(("page", "title"), PARTS)
def test_all_code_of_a_page_runs(page, title, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("CENTER", "RANK", "WORKERS", "WORKER"):  # set by the page and restored
        monkeypatch.setenv(f"AGN_OPTAX_{name}", "")
    scope, printed = {}, io.StringIO()
    with contextlib.redirect_stdout(printed):
        for piece in code(parts(page)[title]):
            exec(compile(piece, piece, "exec"), scope)  # noqa: S102 our own text
    assert "nan" not in printed.getvalue()


def named(part):
    """Return the names in the left column of tables, or before the tables."""
    rows = "\n".join(row["there"] for row in map(ROW.match, part.splitlines()) if row)
    before = part.split("\n| ")[0]
    spans = re.findall(r"`([^`]*)`", rows + "\n" + FENCE.sub("", before))
    return {name for span in spans for name in re.findall(r"\w+", span)}


@pytest.mark.parametrize("title", ORIGINALS)
def test_page_names_every_original_api(title):
    missing = set(ORIGINALS[title].split()) - named(parts(TENSORFLOW)[title])
    assert not missing


# The options of a launch and the program that it starts.
PROGRAMS = re.findall(
    r"`agn-optax launch --workers 2 ([^`]*) train\.py`.*?```py worker\n(.*?)```",
    (DOCS / TENSORFLOW).read_text(),
    re.DOTALL,
)


@pytest.mark.parametrize(("options", "program"), PROGRAMS, ids=["agn", "easgd"])
def test_whole_program_trains_with_two_workers(
    options, program, tmp_path, unix_address, monkeypatch
):
    """The workers are threads here; the center has the options of the launch line."""
    monkeypatch.chdir(tmp_path)
    address = unix_address
    scopes = [{}, {}]

    def work(scope):
        exec(compile(program, "train.py", "exec"), scope)  # noqa: S102 our own text

    def run(center):
        monkeypatch.setenv("AGN_OPTAX_CENTER", address)
        monkeypatch.setenv("AGN_OPTAX_WORKERS", "2")
        threads = []
        for rank, scope in enumerate(scopes):
            monkeypatch.setenv("AGN_OPTAX_RANK", str(rank))
            monkeypatch.setenv("AGN_OPTAX_WORKER", f"worker-{rank}")
            threads.append(threading.Thread(target=work, args=(scope,)))
            threads[-1].start()
            wait_until(
                lambda scope=scope: "env" in scope
            )  # it has read its environment
        for thread in threads:
            thread.join(commands.PATIENCE)
        trained = center.pull()
        assert trained.version >= 100
        np.testing.assert_allclose(trained.params["w"], [1.0, -2.0, 3.0], atol=0.2)

    rule = re.search(r"connect\(env\.address, (.*)\)\n", program)[1]
    optimizer = optax.sgd(0.02, momentum=0.9)
    names = {"agn_optax": agn_optax, "optimizer": optimizer}
    rule = eval(rule, names)  # noqa: S307 our own text
    commands.serve(address, rule, *shlex.split(options), then=run)
    assert all(scope["worker"].exchanges > 0 for scope in scopes)
    assert {path.name for path in tmp_path.iterdir()} & {"kept", "model"}
