_penstock_verbs() {
  case "$1" in
@VERBS@  esac
}
_penstock_flags() {
  case "$1" in
@FLAGS@  esac
}
_penstock_values() {
  case "$1" in
@VALUES@  esac
}
_penstock_takes_a_run() {
  case "$1" in
    @TAKE_A_RUN@) return 0 ;;
  esac
  return 1
}
_penstock_runs() {
  local folder
  for folder in runs/*/; do
    [ -d "$folder" ] && basename "$folder"
  done
}
_penstock_keys='@KEYS@'
_penstock_sections='@SECTIONS@'
