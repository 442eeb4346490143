#compdef penstock
# zsh completion of penstock; load it after compinit with:  eval "$(penstock completion zsh)"
@FUNCTIONS@
_penstock() {
  local verb='' word found key current="$PREFIX"
  local -i position=0 at
  local -a next
  for (( at = 2; at < CURRENT; at++ )); do
    word="${words[at]}"
    next=(${=$(_penstock_verbs "$verb")})
    if (( position == 0 && ${next[(Ie)$word]} )); then
      verb="${verb:+$verb }$word"
    else
      position+=1
    fi
  done
  case "$current" in
    *=*)
      key="${current%%=*}"
      found="$(_penstock_values "${key#--}")"
      compset -P '*='
      if [[ -n "$found" ]]; then compadd -- ${=found}; else _files; fi
      return ;;
    -*) compadd -- ${=$(_penstock_flags "$verb")}; return ;;
  esac
  if [[ "$verb" == settings ]]; then compadd -- ${=_penstock_sections} ${=_penstock_keys}; return; fi
  (( position == 0 )) && compadd -- ${=$(_penstock_verbs "$verb")}
  [[ -z "$verb" ]] && return
  if (( position == 0 )) && [[ -n "$(_penstock_verbs "$verb")" ]] && ! _penstock_takes_a_run "$verb"; then return; fi
  if (( position == 0 )) && _penstock_takes_a_run "$verb"; then
    compadd -- ${(f)"$(_penstock_runs 2>/dev/null)"}
    return
  fi
  case "$current" in
    '') ;;
    *.*) compadd -S = -- ${=_penstock_keys} ;;
    *) compadd -S . -- ${=_penstock_sections} ;;
  esac
  _files
}
if [[ "${funcstack[1]}" == _penstock ]]; then _penstock "$@"; else compdef _penstock penstock; fi
