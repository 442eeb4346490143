"""Scripts that complete the command in bash, zsh and fish: verbs, flags, settings and their values, files and runs.

A script holds everything it completes, so that the tab key starts no Python. It is written from the verbs themselves
and from the files of `console/tools/explain_settings.py`; print it anew after an update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from penstock.console.cli import verb_help
from penstock.console.tools import explain_settings
from penstock.protocol.command_line import App
from penstock.protocol.config.setting_description import ANY_NAME
from penstock.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Words:
    """Everything that is completed."""

    verbs: Mapping[str, Sequence[str]]  # the next words after each verb; "" are the first ones
    flags: Mapping[str, Sequence[str]]  # by verb
    keys: Sequence[str]  # of settings
    values: Mapping[str, Sequence[str]]  # by key
    sections: Sequence[str]
    take_a_run: Sequence[str]  # verbs whose first argument is the name of a run


def script(shell: str, app: App) -> str:
    """Return the script for a shell; raises ConfigError for one that is not supported."""
    if shell not in _SHELLS:
        raise ConfigError(f"no completion for {shell}; choose one of {', '.join(_SHELLS)}")
    return _SHELLS[shell](words_of(app))


def words_of(app: App) -> Words:
    """Return the words of a command."""
    known = explain_settings.load_reference()
    verbs: dict[str, list[str]] = {}
    flags: dict[str, list[str]] = {}
    take_a_run: list[str] = []
    for verb, one in verb_help.verbs_of(app):
        verbs[verb] = sorted(name for name in one if not name.startswith("-"))
        arguments = [] if one.default_command is None else list(one.assemble_argument_collection())
        names = {name for argument in arguments if argument.show for name in argument.names if name.startswith("--")}
        flags[verb] = sorted({"--help", *names})
        if arguments and arguments[0].field_info.name == "run" and arguments[0].index == 0:
            take_a_run.append(verb)
    keys = [key for key in known.settings if f".{ANY_NAME}." not in key]
    values = {key: one.values for key, one in known.settings.items() if one.values}
    return Words(verbs, flags, keys, values, list(known.sections), take_a_run)


def _cases(table: Mapping[str, Sequence[str]], indent: str) -> str:
    return "".join(f"{indent}'{name}') echo '{' '.join(words)}' ;;\n" for name, words in table.items() if words)


def _functions(words: Words) -> str:
    """Return the functions that bash and zsh share."""
    return f"""\
_penstock_verbs() {{
  case "$1" in
{_cases(words.verbs, "    ")}  esac
}}
_penstock_flags() {{
  case "$1" in
{_cases(words.flags, "    ")}  esac
}}
_penstock_values() {{
  case "$1" in
{_cases(words.values, "    ")}  esac
}}
_penstock_takes_a_run() {{
  case "$1" in
    {"|".join(f"'{verb}'" for verb in words.take_a_run)}) return 0 ;;
  esac
  return 1
}}
_penstock_runs() {{
  local folder
  for folder in runs/*/; do
    [ -d "$folder" ] && basename "$folder"
  done
}}
_penstock_keys='{" ".join(words.keys)}'
_penstock_sections='{" ".join(words.sections)}'
"""


def _bash(words: Words) -> str:
    return f"""\
# bash completion of penstock; load it with:  eval "$(penstock completion bash)"
{_functions(words)}
_penstock() {{
  local line word verb='' next found current position=0 key
  line="${{COMP_LINE:0:COMP_POINT}}"
  current="${{line##*[[:space:]]}}"
  COMPREPLY=()
  for word in ${{line%"$current"}}; do
    [ "$word" = penstock ] && [ -z "$verb" ] && [ $position = 0 ] && continue
    case "$word" in */penstock) [ -z "$verb" ] && [ $position = 0 ] && continue ;; esac
    found=''
    for next in $(_penstock_verbs "$verb"); do
      [ $position = 0 ] && [ "$next" = "$word" ] && found=1
    done
    if [ -n "$found" ]; then
      verb="${{verb:+$verb }}$word"
    else
      position=$((position + 1))
    fi
  done
  case "$current" in
    *=*)
      key="${{current%%=*}}"
      found="$(_penstock_values "${{key#--}}")"
      word="${{current#*=}}"
      next=''
      case "$COMP_WORDBREAKS" in *=*) ;; *) next="${{current%%=*}}=" ;; esac  # what bash keeps of the word
      if [ -n "$found" ]; then
        COMPREPLY=($(compgen -P "$next" -W "$found" -- "$word"))
      else
        COMPREPLY=($(compgen -P "$next" -f -- "$word"))
      fi
      return ;;
    -*)
      COMPREPLY=($(compgen -W "$(_penstock_flags "$verb")" -- "$current"))
      case "$current" in --[a-z]*.*) COMPREPLY+=($(compgen -P -- -W "$_penstock_keys" -- "${{current#--}}")) ;; esac
      return ;;
  esac
  if [ "$verb" = settings ]; then
    COMPREPLY=($(compgen -W "$_penstock_sections $_penstock_keys" -- "$current"))
    return
  fi
  next=''
  [ $position = 0 ] && next="$(_penstock_verbs "$verb")"
  COMPREPLY=($(compgen -W "$next" -- "$current"))
  [ -z "$verb" ] && return
  [ -n "$next" ] && ! _penstock_takes_a_run "$verb" && return
  if [ $position = 0 ] && _penstock_takes_a_run "$verb"; then
    COMPREPLY+=($(compgen -W "$(_penstock_runs)" -- "$current"))
    return
  fi
  case "$current" in
    '') ;;
    *.*) COMPREPLY+=($(compgen -S = -W "$_penstock_keys" -- "$current")) ;;
    *) COMPREPLY+=($(compgen -S . -W "$_penstock_sections" -- "$current")) ;;
  esac
  if [ ${{#COMPREPLY[@]}} -gt 0 ]; then
    case "${{COMPREPLY[*]}}" in *[.=]) compopt -o nospace 2>/dev/null ;; esac
  else
    compopt -o filenames 2>/dev/null
  fi
  COMPREPLY+=($(compgen -f -- "$current"))
}}
complete -F _penstock penstock
"""


def _zsh(words: Words) -> str:
    return f"""\
#compdef penstock
# zsh completion of penstock; load it after compinit with:  eval "$(penstock completion zsh)"
{_functions(words)}
_penstock() {{
  local verb='' word found key current="$PREFIX"
  local -i position=0 at
  local -a next
  for (( at = 2; at < CURRENT; at++ )); do
    word="${{words[at]}}"
    next=(${{=$(_penstock_verbs "$verb")}})
    if (( position == 0 && ${{next[(Ie)$word]}} )); then
      verb="${{verb:+$verb }}$word"
    else
      position+=1
    fi
  done
  case "$current" in
    *=*)
      key="${{current%%=*}}"
      found="$(_penstock_values "${{key#--}}")"
      compset -P '*='
      if [[ -n "$found" ]]; then compadd -- ${{=found}}; else _files; fi
      return ;;
    -*) compadd -- ${{=$(_penstock_flags "$verb")}}; return ;;
  esac
  if [[ "$verb" == settings ]]; then compadd -- ${{=_penstock_sections}} ${{=_penstock_keys}}; return; fi
  (( position == 0 )) && compadd -- ${{=$(_penstock_verbs "$verb")}}
  [[ -z "$verb" ]] && return
  if (( position == 0 )) && [[ -n "$(_penstock_verbs "$verb")" ]] && ! _penstock_takes_a_run "$verb"; then return; fi
  if (( position == 0 )) && _penstock_takes_a_run "$verb"; then
    compadd -- ${{(f)"$(_penstock_runs 2>/dev/null)"}}
    return
  fi
  case "$current" in
    '') ;;
    *.*) compadd -S = -- ${{=_penstock_keys}} ;;
    *) compadd -S . -- ${{=_penstock_sections}} ;;
  esac
  _files
}}
if [[ "${{funcstack[1]}}" == _penstock ]]; then _penstock "$@"; else compdef _penstock penstock; fi
"""


def _fish(words: Words) -> str:
    cases = "".join(
        f"    case '{verb}'; string split ' ' '{' '.join(next_)}'\n" for verb, next_ in words.verbs.items() if next_
    )
    lines = [_FISH.replace("CASES", cases), "complete -c penstock -e"]
    for verb, flags in words.flags.items():
        lines += [f"complete -c penstock -n '__penstock_is \"{verb}\"' -l '{flag[2:]}'" for flag in flags]
    lines.append("complete -c penstock -n '__penstock_has_verbs' -f -a '(__penstock_next (__penstock_verb))'")
    for verb in words.take_a_run:
        lines.append(f"complete -c penstock -n '__penstock_is \"{verb}\"' -f -a '(__penstock_runs)'")
    lines.append(f"complete -c penstock -n '__penstock_is settings' -f -a '{' '.join([*words.sections, *words.keys])}'")
    for key in words.keys:
        settings = [f"{key}={value}" for value in words.values.get(key, ())] or [f"{key}="]
        lines.append(f"complete -c penstock -n __penstock_types_a_key -a '{' '.join(settings)}'")
    return "\n".join(lines) + "\n"


_FISH = """\
# fish completion of penstock; load it with:  penstock completion fish | source
function __penstock_next
  switch "$argv"
CASES  end
end
function __penstock_verb
  set -l verb ''
  for word in (commandline -opc)[2..-1]
    contains -- $word (__penstock_next $verb); or break
    set verb (string trim "$verb $word")
  end
  echo $verb
end
function __penstock_is
  test (__penstock_verb) = "$argv"
end
function __penstock_has_verbs
  test -n "$(__penstock_next (__penstock_verb))"; and test (count (commandline -opc)) -eq (math 1 + (count (string split -n ' ' (__penstock_verb))))
end
function __penstock_types_a_key
  test -n (__penstock_verb); and not __penstock_is settings; and string match -q '*.*' -- (commandline -ct)
end
function __penstock_runs
  for folder in runs/*/
    basename $folder
  end
end"""


_SHELLS: dict[str, Callable[[Words], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
