# Says how the tests of one machine went: reads the plan, and what init wrote.
# Exits with 1 if a test failed, or a package did not come to its end. Rows is
# a file that gets the same as rows of a table, with the date in today.

{ sub(/\r$/, "") }

FNR == NR { plan[++planned] = $0; next }

/^@@ linux / { linux = substr($0, 10); next }
/^@@ modules / { modules = $3 " modules, " $4 " with BTF"; next }
/^@@ begin / { package = $3; since[package] = $4; next }
/^@@ end / { status[$3] = $4; took[$3] = $5 - since[$3]; package = test = ""; next }

/^=== (RUN|CONT|NAME) / { test = $3; next }
/^=== PAUSE / || /^(PASS|FAIL)$/ { next }
/^ *--- (PASS|FAIL|SKIP): / {
	verdict = substr($2, 1, 4)
	if (verdict == "FAIL")
		failures[package] = failures[package] " " $3
	if (verdict == "SKIP")
		skips[package] = skips[package] " " $3
	count[package, verdict]++
	test = ""
	next
}
/^panic: |^fatal error: / { test = "" }
{ keep(package, test, substr($0, 1, 240)) }

# keep keeps the last lines of a test: the end of a verifier's log has the reason,
# and the first ones of what ended all tests.
function keep(p, t, line) {
	said[p, t, ++lines[p, t]] = line
	delete said[p, t, t ? lines[p, t] - 60 : lines[p, t] > 30 ? lines[p, t] : 0]
}

function show(p, t,    i) {
	for (i = 1; i <= lines[p, t]; i++)
		if ((p, t, i) in said)
			print "        " said[p, t, i]
}

# kernel is the version of Debian's package: "5.10.223-1".
function kernel(    i, n, fields) {
	n = split(linux, fields, " ")
	for (i = 2; i <= n; i++)
		if (fields[i - 1] == "Debian")
			return fields[i] (linux ~ /arm64/ ? " arm64" : "")
	return linux
}

END {
	print "Linux " (linux ? linux ", " modules : "did not start its tests")
	for (i = 1; i <= planned; i++) {
		p = plan[i]
		pass = p in status && status[p] == 0
		if (!pass)
			bad = 1
		printf "  %s  %-15s %d passed, %d failed, %d skipped, %s\n", pass ? "PASS" : "FAIL", p,
			count[p, "PASS"], count[p, "FAIL"], count[p, "SKIP"],
			p in status ? took[p] " s" : p in since ? "did not end" : "did not start"
		printf "| Debian %s | %s | %d | %d | %d | %s | %s |\n", linux ? kernel() : "?", p, count[p, "PASS"],
			count[p, "FAIL"], count[p, "SKIP"], p in status ? took[p] " s" : "no", today >>rows
		if (skips[p])
			print "      skipped:" skips[p]
		if (pass)
			continue
		n = split(failures[p], failed, " ")
		for (j = 1; j <= n; j++) {
			print "      --- " failed[j]
			show(p, failed[j])
		}
		show(p, "")
	}
	exit bad
}
