# bash completion of penstock; load it with:  eval "$(penstock completion bash)"
@FUNCTIONS@
_penstock() {
  local line word verb='' next found current position=0 key
  line="${COMP_LINE:0:COMP_POINT}"
  current="${line##*[[:space:]]}"
  COMPREPLY=()
  for word in ${line%"$current"}; do
    [ "$word" = penstock ] && [ -z "$verb" ] && [ $position = 0 ] && continue
    case "$word" in */penstock) [ -z "$verb" ] && [ $position = 0 ] && continue ;; esac
    found=''
    for next in $(_penstock_verbs "$verb"); do
      [ $position = 0 ] && [ "$next" = "$word" ] && found=1
    done
    if [ -n "$found" ]; then
      verb="${verb:+$verb }$word"
    else
      position=$((position + 1))
    fi
  done
  case "$current" in
    *=*)
      key="${current%%=*}"
      found="$(_penstock_values "${key#--}")"
      word="${current#*=}"
      next=''
      case "$COMP_WORDBREAKS" in *=*) ;; *) next="${current%%=*}=" ;; esac  # what bash keeps of the word
      if [ -n "$found" ]; then
        COMPREPLY=($(compgen -P "$next" -W "$found" -- "$word"))
      else
        COMPREPLY=($(compgen -P "$next" -f -- "$word"))
      fi
      return ;;
    -*)
      COMPREPLY=($(compgen -W "$(_penstock_flags "$verb")" -- "$current"))
      case "$current" in --[a-z]*.*) COMPREPLY+=($(compgen -P -- -W "$_penstock_keys" -- "${current#--}")) ;; esac
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
  if [ ${#COMPREPLY[@]} -gt 0 ]; then
    case "${COMPREPLY[*]}" in *[.=]) compopt -o nospace 2>/dev/null ;; esac
  else
    compopt -o filenames 2>/dev/null
  fi
  COMPREPLY+=($(compgen -f -- "$current"))
}
complete -F _penstock penstock
