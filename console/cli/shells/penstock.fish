# fish completion of penstock; load it with:  penstock completion fish | source
function __penstock_next
  switch "$argv"
@CASES@  end
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
end
