"""From the section `plugins` of a configuration to a plugin manager: discovery, options, order, conflicts."""

import hashlib
import inspect
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from numbers import Real
from pathlib import Path
from typing import Any

import pluggy

from grpozoo import hooks
from grpozoo.calls.answers import described
from grpozoo.calls.guard import blamed, guard, ignore, nobody_answered
from grpozoo.compose.options import read_options
from grpozoo.compose.registry import installed, load_class, owner_of, source_hash
from grpozoo.errors import UserError, unknown
from grpozoo.hooks import HOOK_VERSION, KINDS, NEEDS, Plugin, hookimpl
from grpozoo.ops import weighted_total


class Defaults(Plugin):
    """What the hooks answer when no plugin has an opinion."""

    @hookimpl(trylast=True)
    def prepare_prompts(self, prompts):
        return prompts

    @hookimpl(trylast=True)
    def transform_rewards(self, rollouts, rewards):
        return replace(rewards, total=weighted_total(rewards.components, rewards.weights, rollouts.group_id))

    @hookimpl(trylast=True)
    def resample(self, rollouts, rewards):
        return rollouts, rewards


def create(name: str, options: Any, found: dict[str, EntryPoint] | None = None) -> Plugin:
    """One plugin with its validated options. found: `installed()`, to look once for many."""
    found = installed() if found is None else found
    cls = load_class(name, found=found)
    check_class(name, cls, found[name])
    _check_attributes(name, cls)
    config = read_options(name, cls.Config, options, f"plugins.{name}", found[name])
    try:
        with blamed(name, f"{cls.__name__}()", apart=(ValueError, TypeError)):
            plugin = cls(config)
    except (ValueError, TypeError) as error:
        raise UserError(f"plugins.{name}: {error}") from None
    plugin.name = name
    if stray := set(plugin.needs) - NEEDS:
        raise unknown(f"need of plugin {name!r}", sorted(stray)[0], NEEDS)
    return plugin


def check_class(name: str, cls: Any, entry: EntryPoint) -> None:
    """Refuse what is no plugin, or one for other hooks."""
    owner = owner_of(entry)
    if not (inspect.isclass(cls) and issubclass(cls, Plugin)):
        raise UserError(f"plugin {name!r} (from {owner}): {cls!r} is not a subclass of grpozoo.Plugin")
    if cls.hook_version != HOOK_VERSION:
        raise UserError(
            f"plugin {name!r} (from {owner}) was written for hook version {cls.hook_version}, this grpozoo has {HOOK_VERSION}\n"
            f"install the release of {owner.split()[0]} for it"
        )


def _check_attributes(name: str, cls: type[Plugin]) -> None:
    """What a plugin says of itself has the form of what Plugin says: a set, a table, a number."""
    forms = {frozenset: (Set, "a set of names"), dict: (Mapping, "a dictionary"), int: (Real, "a number")}
    for attribute, default in vars(Plugin).items():
        form, expected = forms.get(type(default), (object, ""))
        value = getattr(cls, attribute)
        if not attribute.startswith("__") and not isinstance(value, form):
            raise UserError(f"plugin {name!r}: {cls.__name__}.{attribute} is {described(value)}\nexpected: {expected}")


@dataclass
class Active:
    """The plugins of a run, in the order of application."""

    manager: pluggy.PluginManager
    plugins: dict[str, Plugin]  # name -> plugin, without the defaults

    @property
    def hooks(self):
        """Call a hook: `active.hooks.advantage(rollouts=..., rewards=..., run=...)`."""
        return self.manager.hook

    @property
    def needs(self) -> frozenset[str]:
        """The union of what the plugins need."""
        return frozenset().union(*(plugin.needs for plugin in self.plugins.values()))

    def answering(self) -> dict[str, list[str]]:
        """Hook -> names of the plugins that implement it, in the order in which their effects apply."""
        order = {}
        for hook, kind in KINDS.items():
            implementations = [
                impl for impl in getattr(self.hooks, hook).get_hookimpls() if impl.plugin_name != "defaults"
            ]
            wrappers = [impl for impl in implementations if impl.wrapper or impl.hookwrapper]
            plain = [impl for impl in implementations if impl not in wrappers]
            # The caller goes from the last to the first; the innermost wrapper is the first registered.
            chosen = sorted(plain, key=lambda impl: impl.trylast)[:1] if kind in ("one", "chain") else plain
            order[hook] = [impl.plugin_name for impl in [*chosen, *wrappers]]
        return {hook: names for hook, names in order.items() if names}

    def manifest(self) -> dict[str, Any]:
        """What a reader needs to rebuild the run: distributions, versions, hashes of the sources, hooks in order."""
        entries, rows = installed(), {}
        for name, plugin in self.plugins.items():
            rows[name] = {
                "class": entries[name].value,
                "distribution": owner_of(entries[name]),
                "sha256": source_hash(type(plugin)),
                "files": {str(file): hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in plugin.files()},
                "needs": sorted(plugin.needs),
            }
        return {"hook_version": HOOK_VERSION, "plugins": rows, "hooks": self.answering()}


def activate(section: Any, found: dict[str, EntryPoint] | None = None, order: Sequence[str] | None = None) -> Active:
    """The plugins of `section` (name -> options), created, put in order, registered, and checked for conflicts.

    Wrappers of one hook apply by Plugin.order and then by name, wherever a plugin stands in the configuration; those
    listed in `order` (all of them or some) keep among themselves the order of that list.
    """
    found = installed() if found is None else found
    plugins = {str(name): create(str(name), options, found) for name, options in (section or {}).items()}
    names = sorted(plugins, key=lambda name: (plugins[name].order, name))
    if order:
        for name in order:
            if name not in plugins:
                raise unknown("plugin in order", name, plugins)
        listed = iter(dict.fromkeys(order))
        names = [next(listed) if name in order else name for name in names]
    return register({name: plugins[name] for name in names})


class Manager(pluggy.PluginManager):
    """pluggy's, which looks for marks of hooks at every attribute of a plugin with `inspect.getattr_static`: too slow."""

    def parse_hookimpl_opts(self, plugin, name):
        attribute = vars(plugin).get(name, getattr(type(plugin), name, None))
        return getattr(attribute, f"{self.project_name}_impl", None)


def register(plugins: dict[str, Plugin]) -> Active:
    """Existing plugins -> Active; unknown hooks, two owners of one hook and hooks that nobody answers are UserErrors."""
    manager = Manager("grpozoo")
    manager.add_hookspecs(hooks)
    manager.register(Defaults(Defaults.Config()), "defaults")
    for name, plugin in plugins.items():
        _enter(manager, name, plugin)
    manager.add_hookcall_monitoring(ignore, nobody_answered)
    active = Active(manager, plugins)
    _check_owners(active)
    _check_stack(active)
    _check_idle_options(active)
    return active


def check_hooks(name: str, cls: type[Plugin]) -> None:
    """Refuse a class whose hooks would not be called as they stand; no options are needed to tell."""
    manager = Manager("grpozoo")
    manager.add_hookspecs(hooks)
    _enter(manager, name, object.__new__(cls))


def _enter(manager: Manager, name: str, plugin: Plugin) -> None:
    _check_hooks(name, plugin)
    try:
        manager.register(plugin, name)
        manager.check_pending()
        guard(manager, plugin)
    except pluggy.PluginValidationError as error:
        raise UserError(f"plugin {name!r} does not fit the hooks: {str(error).splitlines()[-1].strip()}") from None


def _check_hooks(name: str, plugin: Plugin) -> None:
    """A hook overridden without its decorator would silently vanish, and so would a misspelt one."""
    for attribute in dir(type(plugin)):
        marked = getattr(getattr(type(plugin), attribute), "grpozoo_impl", None) is not None
        if attribute in KINDS and not marked:
            raise UserError(f"plugin {name!r}: {attribute}() is a hook and lacks the decorator @hookimpl")
        if marked and attribute not in KINDS:
            raise unknown(f"hook in plugin {name!r}:", attribute, KINDS)


def _check_stack(active: Active) -> None:
    """Plugins that steer the same quantity, or say that they do not go together."""
    plugins = active.plugins
    for name, plugin in plugins.items():
        for other, reason in plugin.conflicts.items():
            if other in plugins:
                raise UserError(
                    f"{name} does not stack with {other}: {reason}\nkeep one, drop the other with ~plugins.NAME"
                )
        for quantity in plugin.controls:
            rivals = sorted(other for other, rival in plugins.items() if quantity in rival.controls)
            if len(rivals) > 1:
                raise UserError(
                    f"{' and '.join(rivals)} both control the {quantity}: two controllers of one quantity work against "
                    "each other\nkeep one, drop the other with ~plugins.NAME"
                )


def _check_idle_options(active: Active) -> None:
    """Options that somebody set and that nobody reads, because another plugin answers their hook."""
    answering = active.answering()
    for name, plugin in active.plugins.items():
        for hook, options in plugin.options_for.items():
            winner = answering[hook][0]
            changed = [o for o in options if getattr(plugin.config, o) != getattr(type(plugin).Config(), o)]
            if winner != name and changed:
                value = getattr(plugin.config, changed[0])
                raise UserError(
                    f"plugins.{name}.{changed[0]}={getattr(value, 'name', value)} has no effect: {winner} replaces {hook}()\n"
                    f"set the options of plugins.{winner}, or drop it with ~plugins.{winner}"
                )


def _check_owners(active: Active) -> None:
    for hook, kind in KINDS.items():
        plain = [impl for impl in getattr(active.hooks, hook).get_hookimpls() if not (impl.wrapper or impl.hookwrapper)]
        owners = [impl.plugin_name for impl in plain if not impl.trylast]
        if kind in ("one", "chain") and len(owners) > 1:
            advice = "write it as a wrapper" if kind == "chain" else "keep one, drop the other with ~plugins.NAME"
            raise UserError(f"{' and '.join(sorted(owners))} both replace {hook}(): {advice}")
        if kind in ("one", "chain") and not plain:
            raise UserError(
                f"no plugin answers {hook}(): the configuration lost one of base, sampler, engine or params"
            )
    if not active.hooks.reward.get_hookimpls():
        raise UserError("no reward: choose one with reward=NAME (reward=answer asks the task's own verifier)")
