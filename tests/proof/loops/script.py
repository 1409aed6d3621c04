"""A drawn loop, and its program. The program that is printed as a seed's history is the one that runs.

Besides Python, torch and `loops.kit`, a program uses four names that `loops.life` provides:
``InMemorySnapshot``, which does nothing when the loop runs undisturbed; ``here(place)``, where it may be killed;
``note(step, loss)``; and ``finished(name=object, ...)``, which takes the objects whose state is compared.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from functools import cached_property
from textwrap import indent

TENSOR = r"(model|optim)\d*\.\w|tracked\.\w"
"""Matches the names that holdfast gives to tensors of the state."""

RANDOM = r"generator|random"
DATA = rf"{RANDOM}|loader|iterator|place in the data|another batch"


@dataclass(frozen=True, slots=True)
class End:
    """How one life ends: at `place`, in the first step from `step` on in which a snapshot is protected."""

    step: int
    place: str
    kind: str


@dataclass(frozen=True, slots=True)
class Twist:
    """One further feature of a loop, by the name that `Script` knows; `at`: the step of the event, or the interval."""

    name: str
    at: int = 0


@dataclass(frozen=True)
class Loop:
    """A training loop, as drawn. Its fields name pieces that `Script` puts together.

    Attributes:
        form: the form of the loop: ``range`` or ``while``, both undeclared; ``steps`` or ``begin``, declared. Some
            `data` have a form of their own.
        zero: where gradients are zeroed: ``top``, ``middle``, ``end``.
        tail: the order of the pieces that follow the step.
        steps: number of steps.
        ends: how each life of the killed run ends. One more life then runs to the end of the loop.
        held: the place in a step at which its state is copied, as if steps were longer than copies; ``free``: any.
        waits: in which steps the harness waits for protection: ``each``, or ``last``: from the step before an end on.
    """

    seed: int
    model: str = "mlp"
    optimizer: str = "sgd"
    data: str = "fresh"
    form: str = "range"
    zero: str = "top"
    twists: tuple[Twist, ...] = ()
    tail: tuple[str, ...] = ()
    steps: int = 8
    ends: tuple[End, ...] = ()
    held: str = "free"
    waits: str = "each"

    @cached_property
    def script(self) -> Script:
        """The program."""
        return Script(self)

    def features(self) -> list[str]:
        """The names of its pieces and twists, to count by."""
        plain = [f"{f.name}: {getattr(self, f.name)}" for f in fields(self)[1:6]]
        return [*plain, *(t.name for t in self.twists)]

    def history(self) -> str:
        """The whole loop, as text: features, ends and the program."""
        ends = "; ".join(f"{e.kind} at {e.place!r} of step {e.step} or later" for e in self.ends)
        return (
            f"# seed {self.seed}: {', '.join(self.features())}\n"
            f"# ends: {ends}; copies are made: {self.held}; waits for protection: {self.waits}\n{self.script.text}"
        )


MODELS = {
    "mlp": "Sequential(Linear(6, 8), Tanh(), Linear(8, 6))",
    "dropout": "Sequential(Linear(6, 8), Dropout(0.3), Linear(8, 6))",
    "batchnorm": "Sequential(Linear(6, 8), BatchNorm1d(8), ReLU(), Linear(8, 6))",
    "embedding": "Sequential(Embedding(12, 6, max_norm=1.0), Linear(6, 6))",
    "tied": "Tied()",
    "spectral norm": "Sequential(parametrizations.spectral_norm(Linear(6, 8)), Tanh(), Linear(8, 6))",
    "old spectral norm": "Sequential(spectral_norm(Linear(6, 8)), Tanh(), Linear(8, 6))",
    "weight norm": "Sequential(parametrizations.weight_norm(Linear(6, 8)), Tanh(), Linear(8, 6))",
    "old weight norm": "Sequential(weight_norm(Linear(6, 8)), Tanh(), Linear(8, 6))",
    "extra state": "Sequential(Scaled(6, 8), Tanh(), Scaled(8, 6))",
    "parts": "ModuleDict({'e': Linear(6, 8), 'd': Linear(8, 6)})",
    "frozen part": "Sequential(Linear(6, 8), Tanh(), Linear(8, 6))",
    "bank": "Bank()",
}

CALLS = {"parts": "{net}['d']({net}['e'](x).tanh())"}
"""The call of models that are not called as ``net(x)``."""

FIRST = {"parts": "net['e'].weight", "tied": "net.inner.weight", "bank": "net.layer.weight"}
"""The parameter of each model that twists freeze, write or add later; by default ``net[-1].weight``."""

OPTIMIZERS = {
    "sgd": "SGD(net.parameters(), lr=0.1)",
    "momentum": "SGD(net.parameters(), lr=0.05, momentum=0.9)",
    "adam": "Adam(net.parameters(), lr=0.02)",
    "adamw": "AdamW(net.parameters(), lr=0.02, foreach=False)",
    "amsgrad": "Adam(net.parameters(), lr=0.02, amsgrad=True)",
    "rmsprop": "RMSprop(net.parameters(), lr=0.01, momentum=0.5)",
    "adagrad": "Adagrad(net.parameters(), lr=0.05)",
    "groups": "AdamW([{'params': [p], 'lr': 0.01 * (i + 1)} for i, p in enumerate(net.parameters())])",
    "closure": "Adam(net.parameters(), lr=0.02)",
    "lbfgs": "LBFGS(net.parameters(), lr=0.1, max_iter=3, history_size=4)",
    "sam": "SAM(net.parameters(), SGD, lr=0.05, momentum=0.9)",
    "sam, its base": "SAM(net.parameters(), SGD, lr=0.05, momentum=0.9)",
    "schedule-free": "ScheduleFree(net.parameters(), lr=0.1)",
    "container": "Container([net], AdamW, lr=0.02)",
    "noted": "SGD(net.parameters(), lr=0.05, momentum=0.9)",
}
OPTIMIZER_WORDS = {
    "sam": r"never steps|never stepped|optimizer|" + TENSOR,
    "sam, its base": TENSOR,
    "schedule-free": TENSOR,
    "container": r"Container|optimizer",
    "noted": TENSOR,
    "in backward": TENSOR + "|optimizer",
    "two": TENSOR + "|optimizer|ran forward in training mode",
}


@dataclass
class Script:
    """The program of a loop.

    Attributes:
        text: the source.
        words: a regular expression that matches errors and warnings that name the cause.
        before_steps: places that each step passes, each the last one before an optimizer steps.
    """

    loop: Loop
    words: str = ""
    text: str = ""
    before_steps: tuple[str, ...] = ("backward",)
    _setup: list[str] = field(default_factory=list)
    _after_setup: list[str] = field(default_factory=list)
    _models: list[str] = field(default_factory=lambda: ["net"])
    _schedulers: list[str] = field(default_factory=list)
    _extra: dict[str, str] = field(default_factory=dict)
    _tracks: list[str] = field(default_factory=list)
    _inside: list[str] = field(default_factory=list)
    _top: list[str] = field(default_factory=list)
    _ready: list[str] = field(default_factory=list)
    _tail: dict[str, list[str]] = field(default_factory=dict)
    _kept: dict[str, str] = field(default_factory=lambda: {"net": "net", "optim": "optim"})
    _blame: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        loop = self.loop
        self._twists = {t.name: t for t in loop.twists}
        self._lines: list[str] = []
        self._forward = CALLS.get(loop.model, "{net}(x)")
        self._own = FIRST.get(loop.model, "net[-1].weight")
        self._given = "optim"
        self._model()
        self._optimizer()
        self._data()
        for twist in loop.twists:
            self._add(twist)
        self._compose()
        self.words = "|".join(dict.fromkeys(self._blame)) or r"(?!)"
        self.text = "\n".join(self._lines) + "\n"

    @property
    def places(self) -> list[str]:
        """The places where the program may be ended, in the order of the text."""
        return list(dict.fromkeys(re.findall(r'here\("([^"]+)"', self.text)))

    def _has(self, name: str) -> bool:
        return name in self._twists

    # ------------------------------------------------------------------ pieces

    def _model(self) -> None:
        loop = self.loop
        self._setup.append(f"net = {MODELS[loop.model]}")
        if loop.model == "frozen part":
            self._setup.append("net[0].requires_grad_(False)")
        if loop.model == "bank":
            self._tail["bank"] = ["net.rows.data[step % 8] = net.layer.weight.data[step % 6]"]
            self._blame.append(TENSOR)
        if loop.model in ("embedding", "extra state", "spectral norm", "old spectral norm"):
            self._blame.append(TENSOR)

    def _optimizer(self) -> None:
        name = self.loop.optimizer
        if name == "two":
            second = "listed last" if self._has("two: critic listed last") else "listed first"
            self._setup += [
                "critic = Linear(6, 1)",
                "optim = Adam(net.parameters(), lr=0.02)",
                "optim_critic = Adam(critic.parameters(), lr=0.02)",
            ]
            self._models.append("critic")
            self._given = "[optim, optim_critic]" if second == "listed last" else "[optim_critic, optim]"
            self._kept |= {"critic": "critic", "optim_critic": "optim_critic"}
        elif name == "in backward":
            self._setup += [
                "optims = [SGD([p], lr=0.05, momentum=0.9) for p in net.parameters() if p.requires_grad]",
                "for optim in optims:",
                "    optim.param_groups[0]['params'][0].register_post_accumulate_grad_hook(stepping(optim))",
            ]
            self._given = "optims"
            del self._kept["optim"]
            self._kept["optims"] = "optims"
        else:
            self._setup.append(f"optim = {OPTIMIZERS[name]}")
        if name == "sam, its base":
            self._given = "optim.base"
        if name.startswith("sam"):
            self._kept["base"] = "optim.base"
        if name == "container":
            self._kept["inner"] = "optim.optimizers"
        if name == "noted":
            self._setup += [
                "for p in net.parameters():",
                "    if p.requires_grad:",
                "        optim.state[p]['noise'] = torch.zeros_like(p)",
                "        p.register_post_accumulate_grad_hook(noting(optim))",
            ]
        if name in OPTIMIZER_WORDS:
            self._blame.append(OPTIMIZER_WORDS[name])

    def _data(self) -> None:
        name, integers = self.loop.data, self.loop.model == "embedding"
        shape = "randint(0, 12, (40,)" if integers else "randn((40, 6)"
        rows = f"rows = torch.{shape}, generator=torch.Generator().manual_seed(3))"
        fresh = "torch.randint(0, 12, (4,))" if integers else "torch.randn(4, 6)"
        self._next = [f"x = {fresh}"]
        if name == "indexed":
            self._setup.append(rows)
            self._next = ["x = rows[4 * step % 40 :][:4]"]
        elif name == "numpy":
            drawn = "numpy.random.randint(0, 12, 4)" if integers else "numpy.random.randn(4, 6).astype('f4')"
            self._next = [f"x = torch.from_numpy({drawn})"]
        elif name == "python":
            self._setup.append(rows)
            self._next = ["x = rows[[random.randrange(40) for _ in range(4)]]"]
        elif name == "own generator":
            self._setup.append("source = torch.Generator().manual_seed(5)")
            self._tracks.append("snap.track('source', get=source.get_state, set=source.set_state)")
            self._next = [fresh.removesuffix(")") + ", generator=source)"]
            self._next = [f"x = {self._next[0]}"]
            self._kept["source"] = "source"
            self._blame.append(r"source|" + RANDOM)
        elif name.startswith("prefetched"):
            (self._setup if "before" in name else self._inside).append(f"following = {fresh}")
            self._next = ["x = following"]
            self._ready = [f"following = {fresh}"]
            self._blame.append(DATA)
        elif name.startswith("loader"):
            self._loader(name, rows)

    def _loader(self, name: str, rows: str) -> None:
        options = ", shuffle=True" if "shuffled" in name else ""
        options += ", num_workers=2" if "workers" in name else ""
        if "own generator" in name:
            options += ", generator=torch.Generator().manual_seed(6)"
        length = "[:12]" if "epochs" in name or "snap.data" in name else ""
        kind = "RowStream" if "iterable" in name else "Rows"
        loader = f"DataLoader({kind}(rows{length}), batch_size=4{options})"
        self._setup += [rows, f"loader = {f'list(rows{length}.split(4))' if 'list' in name else loader}"]
        self._blame.append(DATA)
        if "iterator before" in name:
            self._setup.append("batches = iter(loader)")
        elif "iterator inside" in name:
            self._inside.append("batches = iter(loader)")
        if "iterator" in name:
            self._inside.append("for _ in range(snap.step):")
            self._inside.append("    next(batches)")
            self._next = ["x = next(batches)"]
        else:
            self._next = []

    # ------------------------------------------------------------------ twists

    def _add(self, twist: Twist) -> None:
        kind, _, what = twist.name.partition(": ")
        getattr(self, f"_add_{kind.replace(' ', '_')}", self._ignore)(what, twist)

    def _ignore(self, what: str, twist: Twist) -> None:
        """Do nothing: other pieces look for this twist."""

    def _add_schedule(self, what: str, twist: Twist) -> None:
        kinds = {
            "end": "StepLR(optim, 2, 0.5)",
            "top": "ExponentialLR(optim, 0.8)",
            "lambda": "LambdaLR(optim, lambda n: 1 / (n + 1))",
            "one cycle": "OneCycleLR(optim, max_lr=0.1, total_steps=40)",
            "sequential": "SequentialLR(optim, [LinearLR(optim), ExponentialLR(optim, 0.8)], milestones=[3])",
            "plateau": "ReduceLROnPlateau(optim, patience=0)",
            "in extra": "ExponentialLR(optim, 0.8)",
            "several": "StepLR(optim, 2, 0.5)",
            "list": "StepLR(optim, 2, 0.5)",
        }
        self._setup.append(f"schedule = {kinds[what]}")
        self._kept["schedule"] = "schedule"
        if what == "in extra":
            self._extra["schedule"] = "schedule"
        else:
            self._schedulers.append("schedule")
        step = "schedule.step(loss.detach())" if what == "plateau" else "schedule.step()"
        if what == "top":
            self._top.append(step)
        else:
            self._tail["schedule"] = [step]
        if what in ("several", "list"):
            self._setup.append("decay = ExponentialLR(optim, 0.9)")
            if what == "list":
                self._schedulers.append("decay")
            else:
                self._extra["decay"] = "decay"
            self._kept["decay"] = "decay"
            self._tail["schedule"].append("decay.step()")
        self._blame.append(r"schedul|\blr\b")

    def _add_average(self, what: str, twist: Twist) -> None:
        if what.startswith("module"):
            buffers = ", use_buffers=True" if "buffers" in what else ""
            self._setup.append(f"average = AveragedModel(net{buffers})")
            self._tail["average"] = ["average.update_parameters(net)"]
            self._kept["average"] = "average"
            if "in extra" in what:
                self._extra["average"] = "average"
            elif "tracked" in what:
                self._tracks.append("snap.track('average', tensors=average)")
            else:
                self._models.append("average")
            self._blame.append(TENSOR + "|average")
            return
        if what == "in extra":
            self._setup.append("average = Average(net)")
            self._extra["average"] = "average"
            self._tail["average"] = ["average.update()"]
            self._kept["average"] = "average"
            self._blame.append("average")
            return
        after = ", changes='after step'" if what == "tracked, after step" else ""
        self._setup.append("average = {n: p.detach().clone() for n, p in net.named_parameters()}")
        self._tracks.append(f"snap.track('average', tensors=average{after})")
        write = "average[n].data.lerp_(p.data, 0.1)" if "data" in what else "average[n].lerp_(p.detach(), 0.1)"
        self._tail["average"] = ["for n, p in net.named_parameters():", f"    {write}"]
        self._kept["average"] = "average"
        self._blame.append(TENSOR + "|average")

    def _add_swap(self, what: str, twist: Twist) -> None:
        """`_add_evaluation` writes the code. Needs an evaluation, and an average in a dict."""
        self._blame.append(TENSOR)

    def _add_evaluation(self, what: str, twist: Twist) -> None:
        lines = []
        swap = next((t.name.removeprefix("swap: ") for t in self.loop.twists if t.name.startswith("swap: ")), "")
        put = {
            "copy": ["with torch.no_grad():", "    p.copy_(average[n])"],
            "data": ["p.data.copy_(average[n])"],
            "pointer": ["p.data = average[n]"],
        }
        back = {
            "copy": ["with torch.no_grad():", "    p.copy_(kept[n])"],
            "data": ["p.data.copy_(kept[n])"],
            "pointer": ["p.data = kept[n]"],
        }
        if swap:
            clone = "p.data" if swap == "pointer" else "p.detach().clone()"
            lines += [f"kept = {{n: {clone} for n, p in net.named_parameters()}}"]
            lines += ["for n, p in net.named_parameters():", *(f"    {line}" for line in put[swap])]
        if "eval mode" in what:
            lines.append("net.eval()")
        if self.loop.optimizer == "schedule-free":
            lines.append("optim.eval()")
        held = "held[torch.randperm(40)[:4]]" if "random" in what else "held[:4]"
        call = self._forward.format(net="net").replace("(x)", f"({held})")
        inner = ['here("evaluation")', f"score = {call}.square().mean()"]
        if "loader" in what:
            call = self._forward.format(net="net")
            inner = [
                'here("evaluation")',
                "for x in DataLoader(Rows(held), 20):",
                f"    score = {call}.square().mean()",
            ]
        if "grad" in what:
            lines += inner
        else:
            lines += ["with torch.no_grad():", *(f"    {line}" for line in inner)]
        lines.append('here("evaluated")')
        if "eval mode" in what:
            lines.append("net.train()")
        if self.loop.optimizer == "schedule-free":
            lines.append("optim.train()")
        if swap:
            lines += ["for n, p in net.named_parameters():", *(f"    {line}" for line in back[swap])]
        if twist.at > 1:
            lines = [f"if step % {twist.at} == 1:", *(f"    {line}" for line in lines)]
        integers = self.loop.model == "embedding"
        shape = "randint(0, 12, (40,)" if integers else "randn((40, 6)"
        self._setup.append(f"held = torch.{shape}, generator=torch.Generator().manual_seed(4))")
        if "at the top" in what:
            self._top += lines
        else:
            self._tail["evaluation"] = lines
        if "random" in what or "loader" in what:
            self._blame.append(RANDOM)
        if "grad" in what or "eval mode" not in what:
            self._blame.append(TENSOR + "|forward|" + RANDOM)  # this forward looks like the beginning of a step

    def _add_clip(self, what: str, twist: Twist) -> None:
        lines = {
            "weights": ["with torch.no_grad():", "    for p in net.parameters():", "        p.clamp_(-0.3, 0.3)"],
            "weights, data": ["for p in net.parameters():", "    p.data.clamp_(-0.3, 0.3)"],
            "weights, pointer": ["for p in net.parameters():", "    p.data = p.data.clamp(-0.3, 0.3)"],
        }
        if what in lines:
            self._tail["clip"] = lines[what]
            self._blame.append(TENSOR)

    def _add_freeze(self, what: str, twist: Twist) -> None:
        own = self._own
        if what == "once":
            self._top += [f"if step == {twist.at}:", f"    {own}.requires_grad_(False)"]
        elif what == "once, unfreeze":
            self._setup.append(f"{own}.requires_grad_(False)")
            self._top += [f"if step == {twist.at}:", f"    {own}.requires_grad_(True)"]
        else:
            self._top.append(f"{own}.requires_grad_(step < {twist.at})")
        self._blame.append(TENSOR + "|requires_grad|frozen|gradient")

    def _add_counter(self, what: str, twist: Twist) -> None:
        self._setup.append("counter = [0]")
        when = ", when='step'" if "when step" in what else ""
        self._tracks.append(
            "snap.track('counter', get=lambda: counter[0], set=lambda n: counter.__setitem__(0, n)" + when + ")"
        )
        self._kept["counter"] = "counter"
        if what.startswith("top"):
            self._top.append("counter[0] += 1")
        else:
            self._tail["counter"] = ["counter[0] += 1"]
        self._blame.append("counter")

    def _add_group(self, what: str, twist: Twist) -> None:
        self._setup = [
            line.replace("net.parameters()", f"[{self._own}]") if line.startswith("optim =") else line
            for line in self._setup
        ]
        rest = f"[p for p in net.parameters() if p is not {self._own}]"
        self._top += [f"if step == {twist.at}:", f"    optim.add_param_group({{'params': {rest}, 'lr': 0.01}})"]
        self._blame.append(TENSOR + "|group")

    def _add_target(self, what: str, twist: Twist) -> None:
        """A target network, as in reinforcement learning, written through .data."""
        self._setup += ["target = copy.deepcopy(net)", "target.requires_grad_(False)"]
        self._models.append("target")
        self._kept["target"] = "target"
        self._tail["target"] = [
            "for p, q in zip(net.parameters(), target.parameters()):",
            "    q.data.mul_(0.9).add_(p.data, alpha=0.1)",
        ]
        self._blame.append(TENSOR)

    def _add_scaler(self, what: str, twist: Twist) -> None:
        self._setup.append("scaler = torch.amp.GradScaler('cpu', init_scale=8.0, growth_interval=3)")
        self._extra["scaler"] = "scaler"
        self._kept["scaler"] = "scaler"
        self._blame.append("scaler")

    def _add_skip(self, what: str, twist: Twist) -> None:
        self._blame.append(r"skip|no gradients .*were computed|another batch")

    def _add_written(self, what: str, twist: Twist) -> None:
        """`_work` writes the code: it writes while the step runs, in place only when backward is over."""
        self._blame.append(TENSOR)

    def _add_unzeroed(self, what: str, twist: Twist) -> None:
        self._blame.append(r"grad")

    # ------------------------------------------------------------------ put together

    def _compose(self) -> None:
        loop = self.loop
        out = self._lines
        out += [f"torch.manual_seed({loop.seed})", f"numpy.random.seed({loop.seed})", f"random.seed({loop.seed})"]
        out += self._setup
        model = self._models[0] if len(self._models) == 1 else f"[{', '.join(self._models)}]"
        options = [model, self._given]
        if self._has("compile: model"):
            out.append("run = torch.compile(net, backend='eager')")
            self._forward = self._forward.replace("{net}(", "run(")
        if len(self._schedulers) == 1:
            options.append(f"scheduler={self._schedulers[0]}")
        elif self._schedulers:
            options.append(f"scheduler=[{', '.join(self._schedulers)}]")
        if self._extra:
            options.append("extra={" + ", ".join(f"'{k}': {v}" for k, v in self._extra.items()) + "}")
        out.append(f"snap = InMemorySnapshot({', '.join(options)})")
        out += self._tracks
        out.append("with snap:")
        body = [*self._inside]
        if self._has("compile: step"):
            body += ["@torch.compile(backend='eager')", "def advance():", "    optim.step()"]
        body += self._loop()
        out += [indent(line, "    ") for line in body]
        out.append(f"finished({', '.join(f'{k}={v}' for k, v in self._kept.items())})")

    def _loop(self) -> list[str]:
        loop = self.loop
        step = self._step()
        n = loop.steps
        if loop.data.startswith("loader, enumerated"):
            head = ["first = snap.step", "for step, x in enumerate(loader):"]
            return [*head, *_in(["if step < first:", "    continue", f"if step >= {n}:", "    break", *step])]
        if loop.data.startswith("loader, epochs"):
            inner = ["step = epoch * len(loader) + i", "if step < first:", "    continue", *step]
            lines = ["first = snap.step", "for epoch in range(3):", "    for i, x in enumerate(loader):"]
            return [*lines, *_in(_in(inner))]
        if loop.data.startswith("loader, snap.data"):
            inner = ["step = snap.step", *step]
            lines = ["for epoch in range(snap.epoch, 3):", "    for x in snap.data(loader):"]
            return [*lines, *_in(_in(inner))]
        if loop.form == "while":
            return [f"while snap.step < {n}:", *_in(["step = snap.step", *step])]
        if loop.form == "steps":
            return [f"for step in snap.steps({n}):", *_in(step)]
        if loop.form == "begin":
            return [f"for step in range(snap.step, {n}):", *_in(["snap.begin()", *step])]
        return [f"for step in range(snap.step, {n}):", *_in(step)]

    def _step(self) -> list[str]:
        loop = self.loop
        zero = [] if loop.optimizer in ("in backward", "lbfgs", "closure") else ["optim.zero_grad()"]
        if self._has("zeroed in place") and zero:
            zero = ["optim.zero_grad(set_to_none=False)"]
        if self._has("group: later"):
            zero = ["net.zero_grad()"]  # parameters that are not in a group yet get gradients, too
        if self._has("unzeroed"):
            zero = ["if step % 2:", "    optim.zero_grad()"]
        lines = ['here("top", step)', *self._top]
        lines += zero if loop.zero == "top" else []
        lines += self._work(zero)
        if not self._has("accumulate") and loop.optimizer not in ("lbfgs", "closure"):
            lines.append('here("backward")')
        lines += self._clip_gradients()
        lines += self._stepping()
        lines.append('here("stepped")')
        if loop.zero == "end" and zero:
            self._tail["zero"] = zero
        order = [*(t for t in loop.tail if t in self._tail), *(t for t in self._tail if t not in loop.tail)]
        for i, name in enumerate(order):
            if i:
                lines.append(f'here("before {name}")')
            lines += self._tail[name]
        if order:
            lines.append('here("end")')
        return lines

    def _work(self, zero: list[str]) -> list[str]:
        """Data, forward and backward."""
        loop = self.loop
        objective = f"({self._forward.format(net='net')} - 1).square().mean()"
        middle = zero if loop.zero == "middle" else []
        if loop.optimizer in ("lbfgs", "closure"):
            self.before_steps = ("batch",)
            inner = ["optim.zero_grad()", f"loss = {objective}", 'here("loss")', "loss.backward()", "return loss"]
            closure = ["def closure():", *_in(inner)]
            return [*self._next, *self._ready, 'here("batch")', *closure]
        if self._has("accumulate"):
            lines = [*self._next, f"loss = {objective} / 2", "note(step, loss)", *self._ready, 'here("loss")']
            return ["for micro in range(2):", *_in([*lines, "loss.backward()"]), 'here("backward")']
        if loop.optimizer == "two":
            self.before_steps = ("loss", "backward")
            critic = [
                "loss = (critic(net(x).detach()) - critic(torch.ones(4, 6))).mean()".replace(
                    "net(x)", self._forward.format(net="net")
                ),
                "loss = loss + loss.square()",
                "note(step, loss)",
                'here("loss")',
                "optim_critic.zero_grad()",
                "loss.backward()",
                "optim_critic.step()",
            ]
            own = [
                f"loss = {objective} - critic({self._forward.format(net='net')}).mean()",
                "note(step, loss)",
                'here("second loss")',
                "optim.zero_grad()",
                "loss.backward()",
            ]
            if self._has("two: critic steps last"):
                first = [line.replace("second loss", "loss") for line in own]
                second = [line.replace('"loss"', '"second loss"') for line in critic]
                return [*self._next, *first, "optim.step()", 'here("between")', *second[:-1]]
            return [*self._next, *critic, 'here("between")', *own]
        if loop.optimizer == "in backward":
            self.before_steps = ("loss",)
        lines = [*self._next, 'here("batch")', f"loss = {objective}", "note(step, loss)", *self._ready, *middle]
        lines.append('here("loss")')
        if self._has("skip"):
            lines += [f"if step == {self._twists['skip'].at}:", "    continue"]
        if self._has("written: data"):
            lines.append(f"{self._own}.data.mul_(0.99)")
        if self._has("scaler"):
            at = self._twists["scaler"].at
            lines += [f"if step == {at}:", "    loss = loss * float('inf')", "scaler.scale(loss).backward()"]
        else:
            lines.append("loss.backward()")
        if self._has("written: in place"):
            lines += ["with torch.no_grad():", f"    {self._own}.mul_(0.99)"]
        if loop.optimizer.startswith("sam"):
            lines += ["optim.first_step()", f"{objective}.backward()"]
        return lines

    def _clip_gradients(self) -> list[str]:
        if self._has("clip: norm"):
            return ["torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)"]
        if self._has("clip: value"):
            return ["torch.nn.utils.clip_grad_value_(net.parameters(), 0.1)"]
        return []

    def _stepping(self) -> list[str]:
        optimizer = self.loop.optimizer
        if optimizer in ("lbfgs", "closure"):
            return ["loss = optim.step(closure)", "note(step, loss)"]
        if optimizer == "in backward":
            return []
        if optimizer.startswith("sam"):
            return ["optim.second_step()"]
        if self._has("scaler"):
            return ["scaler.step(optim)", "scaler.update()"]
        if self._has("compile: step"):
            return ["advance()"]
        if optimizer == "two" and self._has("two: critic steps last"):
            return ["optim_critic.step()"]
        return ["optim.step()"]


def _in(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]
