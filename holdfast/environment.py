"""Every ``HOLDFAST_*`` variable with a sentence about it. The reference in docs/ is generated from this table.

No code reads a variable through this table. `tests/system/test_docs.py` finds the names used in the code, and fails if
one is missing here, or is only here.
"""

from __future__ import annotations

from typing import NamedTuple


class Variable(NamedTuple):
    """An environment variable.

    Attributes:
        default: the value that applies if it is not set, as users would write it; empty: there is none.
        meaning: one or two sentences of Markdown.
    """

    name: str
    default: str
    meaning: str


class VariableGroup(NamedTuple):
    """Variables of one section of the reference."""

    title: str
    text: str
    variables: tuple[Variable, ...]


GROUPS = (
    VariableGroup(
        "The job",
        "Read by trainers and SMPs. Set the same values on every rank and on every restart, except for the name, the "
        "address and the failure domains of a node.",
        (
            Variable(
                "HOLDFAST_JOB",
                "torchrun's run id, or Slurm's job id",
                "Id of the training run: the same on every rank and every restart. `job=` overrides it.",
            ),
            Variable("HOLDFAST_NODE", "the host name", "Name of this node, unique in the job."),
            Variable(
                "HOLDFAST_HOST",
                "127.0.0.1",
                "Address on which this node's SMP listens for the other SMPs, or [one for each network "
                "card](running.md#several-network-cards) with commas between them. Off loopback it needs a token, "
                "certificates, or `HOLDFAST_INSECURE=1`. [On several hosts](running.md#several-hosts) it must be set.",
            ),
            Variable("HOLDFAST_ARENA", "/dev/shm/holdfast-<uid>", "Directory for arenas. It must be on tmpfs."),
            Variable(
                "HOLDFAST_DOMAINS",
                "",
                "What this node fails together with, such as `rack=r7,switch=s3,@dp`. No group has more than m nodes "
                "of one domain, if that is possible.",
            ),
        ),
    ),
    VariableGroup(
        "Taking and restoring snapshots",
        "Read by trainers. An argument of `InMemorySnapshot` of the same meaning takes precedence.",
        (
            Variable(
                "HOLDFAST_OVERHEAD_BUDGET",
                "0.01",
                "Fraction of training time that snapshots may take. Where they would take more, the ranks lengthen "
                "the interval together. `0`: no budget, `every=` always holds.",
            ),
            Variable(
                "HOLDFAST_MTBF",
                "published failure rates",
                'With `every="auto"`: how often one node fails, such as `1000d`, until the job has failures of its '
                "own to go by.",
            ),
            Variable("HOLDFAST_GENERATIONS", "1", "How many protected snapshots are kept."),
            Variable(
                "HOLDFAST_RESTORE_STEP",
                "the newest",
                "Go back to the snapshot of this step. [How](restarts.md#going-back-further).",
            ),
            Variable(
                "HOLDFAST_RUN",
                "the run that was begun last",
                "Go on with the run of this id. [When](restarts.md#which-run-goes-on).",
            ),
            Variable(
                "HOLDFAST_GIVE_UP",
                "",
                "Ids of runs that are over, separated by commas. Nothing of them is restored. "
                "[When](restarts.md#which-run-goes-on).",
            ),
            Variable(
                "HOLDFAST_MAX_REPEATS",
                "5",
                "After this many starts in a row that ended in the same way at the same step, the next one is refused: "
                "a crash-loop ends. `0`: never. [Why](restarts.md).",
            ),
            Variable(
                "HOLDFAST_ELASTIC",
                "0",
                "`1`: restore a snapshot of another number of data-parallel ranks. [How](elastic.md).",
            ),
            Variable(
                "HOLDFAST_DRIFT",
                "",
                "`accept`: go on although the first step after a restore does not begin with what was restored. "
                "[Why](loops.md#after-a-restore).",
            ),
            Variable(
                "HOLDFAST_LOG",
                "",
                "`logfmt` or `json`: the form of log lines. In an SMP the default is `logfmt`; in a trainer, lines go "
                "through Python's `logging` unless this is set, and to standard error if it is.",
            ),
        ),
    ),
    VariableGroup(
        "The SMP",
        "Read by whatever starts an SMP: the first trainer of a node, or `holdfast smp start`, whose options of the "
        "same names take precedence.",
        (
            Variable(
                "HOLDFAST_MEMORY",
                "0",
                "Memory for snapshots, such as `64GB`, reserved when the SMP starts and never exceeded; a job that "
                "needs more is refused. `0`: what the job needs, reserved at its first step.",
            ),
            Variable(
                "HOLDFAST_ZERO",
                "0",
                "`1`: overwrite slots with zeros when they are given up and before they are deleted.",
            ),
            Variable(
                "HOLDFAST_BACKEND",
                "auto",
                "What computes parity: `auto`, `isal`, `numpy` or `pyeclib`. All write the same bytes.",
            ),
            Variable("HOLDFAST_BANDWIDTH", "0", "Most that encoding sends, such as `2GB/s`; `0`: no limit."),
            Variable(
                "HOLDFAST_TURNS",
                "1",
                "In how many turns the groups encode a snapshot, 1 to 64, for networks that cannot carry all of them "
                "at once.",
            ),
            Variable(
                "HOLDFAST_LINKS",
                "auto",
                "Connections to each peer, for each network card of the node, over which units travel side by side, 1 "
                "to 16; `auto`: one for every 16 processors, 1 to 4.",
            ),
            Variable(
                "HOLDFAST_PRIORITY",
                "auto",
                "`auto`: encoding and the scrub give way to the trainers; `idle`: all of the SMP does, which needs "
                "cores to spare; `normal`: nothing does.",
            ),
            Variable(
                "HOLDFAST_SCRUB",
                "64MB/s",
                "The rate at which sealed snapshots are read and checked in the background; `0`: no scrub.",
            ),
            Variable(
                "HOLDFAST_REBUILD",
                "chain",
                "How lost shards are computed: `chain` (the new node receives S bytes) or `decode` (k · S). "
                "[Loading](data-plane.md#loading-a-lost-nodes-state).",
            ),
            Variable(
                "HOLDFAST_REGROUP_AFTER",
                "30s",
                "How long a node may be missing, with no trainer connected, before the survivors regroup without "
                "it; `0`: they never do.",
            ),
            Variable(
                "HOLDFAST_DEADLINES",
                "start=15min,restore=15min,step=60s,factor=10,copy=2min",
                "Watchdog deadlines for trainers of this node by phase: `step=5min,copy=0`. A step may "
                "take the longer of `step` and `factor` times the median step; `0`: no deadline.",
            ),
            Variable(
                "HOLDFAST_ON_HANG",
                "",
                "Shell command run once per hang of a trainer, for at most a minute. [Is it alive?]"
                "(running.md#is-it-alive)",
            ),
            Variable(
                "HOLDFAST_GRACE",
                "25s",
                "The time after SIGTERM for moving what the node holds to other nodes; the SMP then ends in any case. "
                "`0`: it ends at once.",
            ),
            Variable(
                "HOLDFAST_SPARES",
                "",
                "`HOST:PORT,...`: SMPs of this job on nodes without trainers, which take over first what is moved "
                "after SIGTERM. The ports are those for gRPC.",
            ),
            Variable(
                "HOLDFAST_HTTP",
                "auto",
                "Loopback port of the SMP's page, `/status.json` and `/metrics`; `ADDRESS:PORT`: `/metrics` for other "
                "machines. One that is taken is replaced. `auto`: the one before, or any free one; `off`: none.",
            ),
        ),
    ),
    VariableGroup(
        "Storage",
        "Read by whatever starts an SMP. The tier is off unless a place is given. [Snapshots on storage](persist.md).",
        (
            Variable(
                "HOLDFAST_PERSIST",
                "",
                "Where protected snapshots are also written: a directory that all nodes share, or an fsspec URL. The "
                "same on all nodes.",
            ),
            Variable("HOLDFAST_PERSIST_EVERY", "30min", "How often at most: `90s`, `30min`, `2h`."),
            Variable("HOLDFAST_PERSIST_KEEP", "2", "How many whole snapshots are kept there."),
            Variable(
                "HOLDFAST_PERSIST_BANDWIDTH",
                "0",
                "Most that each node reads from memory for it, such as `500MB/s`; `0`: no limit.",
            ),
        ),
    ),
    VariableGroup(
        "Security",
        "Read by trainers and SMPs. [SECURITY.md](../SECURITY.md) has the threat model.",
        (
            Variable("HOLDFAST_TOKEN_FILE", "", "File with the job's token, readable by nobody else."),
            Variable("HOLDFAST_TOKEN", "", "The token itself, where there is no file."),
            Variable("HOLDFAST_TLS_CERT", "", "PEM file with this node's certificate, for mutual TLS between SMPs."),
            Variable("HOLDFAST_TLS_KEY", "", "PEM file with its private key."),
            Variable("HOLDFAST_TLS_CA", "", "PEM file with the authority that signed the certificates."),
            Variable("HOLDFAST_TLS_NAME", "holdfast-smp", "The DNS name that all certificates carry."),
            Variable(
                "HOLDFAST_INSECURE",
                "0",
                "`1`: listen off loopback although nothing is encrypted or authenticated. Only for a network that "
                "no one else reaches.",
            ),
        ),
    ),
    VariableGroup(
        "Set for you",
        "`--on-hang` commands see `HOLDFAST_JOB`, `HOLDFAST_NODE`, and these.",
        (
            Variable("HOLDFAST_COORD", "", "Coordinate of the trainer that hangs, such as `pp0-tp1-cp0-ep0-dp3`."),
            Variable("HOLDFAST_PID", "", "Its process id."),
            Variable("HOLDFAST_PHASE", "", "The phase it hangs in: start, restore, step or copy."),
            Variable("HOLDFAST_STEP", "", "The step it hangs in."),
        ),
    ),
    VariableGroup(
        "Deployment files and examples",
        "Read by files in `deploy/` and `examples/`, not by holdfast.",
        (
            Variable(
                "HOLDFAST_KEEP_S",
                "0",
                "Slurm's epilog: for how many seconds the SMP of a job that has failed, or is requeued, stays.",
            ),
            Variable("HOLDFAST_FOLDER", "", "The DeepSpeed example: the folder for its placeholders."),
        ),
    ),
    VariableGroup(
        "Internal",
        "Set by holdfast's own commands and tests. Do not set them in a job.",
        (
            Variable("HOLDFAST_COMMAND", "", "Marks what a command of holdfast has started, so that it can be ended."),
            Variable("HOLDFAST_AUDIT", "", "What `holdfast audit` and `holdfast chaos run` tell the hook to note."),
            Variable("HOLDFAST_PROFILE", "", "Where `holdfast profile` has the hook write what it measured."),
            Variable("HOLDFAST_POINTS", "", "At which failpoints a process stops until a test lets it go on."),
            Variable("HOLDFAST_TRAINER", "", "What a trainer on a virtual node is to run."),
            Variable("HOLDFAST_CLOCK", "", "The file that says by how much a virtual node's wall clock is off."),
            Variable("HOLDFAST_REJOIN", "1", "`0`: a restarted SMP does not bring back what its node lacks."),
            Variable("HOLDFAST_BENCH_LOAD", "", "Set in the network namespaces of `make bench-load`."),
        ),
    ),
)

VARIABLES = {variable.name: variable for group in GROUPS for variable in group.variables}
