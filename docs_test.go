package sluice_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/maps"
)

// These pages name functions, types and files between backticks. The pictures
// of ARCHITECTURE.md name a function in each box, and its file beside the box.
var checkedPages = []string{"ARCHITECTURE.md", "CONTRIBUTING.md"}

var (
	quoted     = regexp.MustCompile("`([^`\n]+)`")
	box        = regexp.MustCompile(`│ (\S+) +│ (\S+)`)
	identifier = regexp.MustCompile(`^[A-Za-z_]\w*(\.[A-Za-z_]\w*)?$`)
	link       = regexp.MustCompile(`\]\(([^)#:]*)(#[^)]*)?\)`)
	heading    = regexp.MustCompile(`(?m)^#+ (.+)$`)
	unanchored = regexp.MustCompile(`[^\w -]`) // what a fragment does not have of its heading

	functionOfC   = regexp.MustCompile(`(?m)^(?:static|int|enum|struct|void|bool|__)[^;=\n]*?\b(\w+)\([^;]*?\)\n\{`)
	typeOfC       = regexp.MustCompile(`(?m)^(?:struct|enum|union) (\w+) \{`)
	enumeratorOfC = regexp.MustCompile(`(?m)^\t([A-Z]\w+)(?: = [^,\n]+)?,`)
)

// A name that no longer exists, in a page that describes the code, misleads its
// reader.
func TestNamesInDocs(t *testing.T) {
	names := definedNames(t)
	boxes := 0
	for _, page := range checkedPages {
		picture := false
		for i, line := range strings.Split(readPage(t, page), "\n") {
			switch {
			case strings.HasPrefix(line, "```"):
				picture = !picture
			case picture && strings.Count(line, "│") > 1:
				found := box.FindStringSubmatch(line)
				if found == nil {
					t.Errorf("%s:%d: not a box with a function, and its file beside it: %s", page, i+1, line)
					continue
				}
				boxes++
				if !definedIn(names[found[1]], found[2]) {
					t.Errorf("%s:%d: no function %s in %s, but in %v", page, i+1, found[1], found[2], names[found[1]])
				}
			case !picture:
				for _, found := range quoted.FindAllStringSubmatch(line, -1) {
					if !exists(names, found[1]) {
						t.Errorf("%s:%d: `%s` does not exist", page, i+1, found[1])
					}
				}
			}
		}
	}
	if boxes < 30 {
		t.Errorf("only %d boxes were found in the pictures", boxes)
	}
}

// exists reports whether text is a file, or a name that is defined. What is
// neither written like a path nor like a name is not checked, as a command.
func exists(names map[string][]string, text string) bool {
	if identifier.MatchString(text) && filepath.Ext(text) != ".md" && len(names[text]) > 0 {
		return true
	}
	if strings.ContainsAny(text, " =\"*[") || strings.HasPrefix(text, "-") {
		return true
	}
	_, err := os.Stat(text)

	return err == nil
}

// definedIn reports whether one of these files is path, or below it.
func definedIn(files []string, path string) bool {
	for _, file := range files {
		if file == path || strings.HasPrefix(file, strings.TrimSuffix(path, "/")+"/") {
			return true
		}
	}

	return false
}

// definedNames returns the files that define each name: functions, types,
// constants and variables of Go, methods and fields as Type.Name, and functions,
// types and enumerators of C. Names of Go are there with their package as well.
func definedNames(t *testing.T) map[string][]string {
	t.Helper()
	names := make(map[string][]string)
	for _, root := range []string{"bpf", "cmd", "maps", "pkg"} {
		err := filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			switch filepath.Ext(path) {
			case ".go":
				return addNamesOfGo(names, path)
			case ".c", ".h":
				return addNamesOfC(names, path)
			}

			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}

	return names
}

func addNamesOfGo(names map[string][]string, path string) error {
	file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
	if err != nil {
		return err
	}
	add := func(name string) {
		names[name] = append(names[name], path)
		if !strings.Contains(name, ".") {
			qualified := file.Name.Name + "." + name
			names[qualified] = append(names[qualified], path)
		}
	}
	for _, declared := range file.Decls {
		switch d := declared.(type) {
		case *ast.FuncDecl:
			if d.Recv == nil {
				add(d.Name.Name)
			} else {
				add(receiver(d.Recv.List[0].Type) + "." + d.Name.Name)
			}
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				switch s := spec.(type) {
				case *ast.TypeSpec:
					add(s.Name.Name)
					if fields, ok := s.Type.(*ast.StructType); ok {
						for _, field := range fields.Fields.List {
							for _, name := range field.Names {
								add(s.Name.Name + "." + name.Name)
							}
						}
					}
				case *ast.ValueSpec:
					for _, name := range s.Names {
						add(name.Name)
					}
				}
			}
		}
	}

	return nil
}

// receiver returns the name of a method's type.
func receiver(expr ast.Expr) string {
	switch e := expr.(type) {
	case *ast.StarExpr:
		return receiver(e.X)
	case *ast.IndexExpr:
		return receiver(e.X)
	case *ast.IndexListExpr:
		return receiver(e.X)
	case *ast.Ident:
		return e.Name
	}

	return ""
}

func addNamesOfC(names map[string][]string, path string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	for _, pattern := range []*regexp.Regexp{functionOfC, typeOfC, enumeratorOfC} {
		for _, found := range pattern.FindAllStringSubmatch(string(text), -1) {
			names[found[1]] = append(names[found[1]], path)
		}
	}

	return nil
}

func TestLinksInDocs(t *testing.T) {
	err := filepath.WalkDir(".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() && (entry.Name() == ".git" || entry.Name() == "bin") {
			return filepath.SkipDir
		}
		if filepath.Ext(path) != ".md" {
			return nil
		}
		for _, found := range link.FindAllStringSubmatch(readPage(t, path), -1) {
			target := filepath.Join(filepath.Dir(path), found[1])
			if found[1] == "" {
				target = path
			}
			if _, err := os.Stat(target); err != nil {
				t.Errorf("%s links to %s, which does not exist", path, found[1])
			} else if found[2] != "" && !anchors(t, target)[found[2]] {
				t.Errorf("%s links to %s%s, which is no heading there", path, found[1], found[2])
			}
		}

		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// anchors returns the fragments that lead to headings of a page.
func anchors(t *testing.T, path string) map[string]bool {
	t.Helper()
	all := make(map[string]bool)
	for _, found := range heading.FindAllStringSubmatch(readPage(t, path), -1) {
		name := unanchored.ReplaceAllString(strings.ToLower(found[1]), "")
		all["#"+strings.ReplaceAll(name, " ", "-")] = true
	}

	return all
}

func readPage(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}

	return string(text)
}

// Each reason has its entry: what it means, how to see it, and what to do.
func TestReasonsInDocs(t *testing.T) {
	const page = "docs/troubleshoot.md"
	entries := make(map[string]string)
	for _, section := range strings.Split(readPage(t, page), "\n### ")[1:] {
		name, text, _ := strings.Cut(section, "\n")
		entries[strings.Trim(name, "`")] = text
	}
	for _, reason := range maps.Reasons() {
		entry := entries[reason.Label()]
		if !strings.Contains(entry, "\n$ sluice explain ") && !strings.Contains(entry, "\n\""+reason.String()+"\".\n") {
			t.Errorf("%s: reason %s has no entry with an example, or with its text", page, reason.Label())
		}
		delete(entries, reason.Label())
	}
	for name := range entries {
		t.Errorf("%s: there is no reason %s", page, name)
	}
}

// tests are those of a folder, as text.
type tests map[string]string

// has reports whether a folder declares a test.
func (d tests) has(t *testing.T, folder, name string) bool {
	t.Helper()
	if d[folder] == "" {
		files, err := filepath.Glob(filepath.Join(folder, "*_test.go"))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			d[folder] += readPage(t, file)
		}
	}

	return strings.Contains(d[folder], "\nfunc "+name+"(")
}

// Each neighbour in docs/neighbours.md names a test, which exists, or is said to be untried.
func TestNeighboursAreTried(t *testing.T) {
	declared := tests{}
	_, table, _ := strings.Cut(readPage(t, "docs/neighbours.md"), "|---|---|---|\n")
	for line := range strings.Lines(table) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), " | ")
		tried := cells[len(cells)-1]
		named := regexp.MustCompile("`([a-z0-9/]+)\\.(Test[A-Za-z0-9]+)`").FindAllStringSubmatch(tried, -1)
		if len(cells) != 3 || len(named) == 0 && !strings.Contains(tried, "untried") {
			t.Errorf("%q says neither which test tries it nor that it is untried", line)
		}
		for _, name := range named {
			if !declared.has(t, name[1], name[2]) {
				t.Errorf("there is no test %s.%s: %s", name[1], name[2], line)
			}
		}
	}
	if !strings.Contains(table, "Istio") {
		t.Error("the page has no table of neighbours")
	}
}

// shownBy is a test in a table of what an attacker can and cannot do.
var shownBy = regexp.MustCompile("^`([a-z0-9/]+)\\.(Test[A-Za-z0-9]+)`$")

// Each line of docs/security.md about what is open and what others can do names tests, which exist.
func TestSecurityIsShown(t *testing.T) {
	declared := tests{}
	lines := 0
	_, promises, found := strings.Cut(readPage(t, "docs/security.md"), "## What is open")
	if !found {
		t.Fatal("the page has no part about what is open")
	}
	for line := range strings.Lines(promises) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), " | ")
		if !strings.HasPrefix(line, "|") || strings.HasPrefix(line, "|---") || strings.HasSuffix(strings.TrimSpace(line), "| shown by |") {
			continue
		}
		lines++
		for _, name := range strings.Split(strings.TrimSpace(cells[len(cells)-1]), ", ") {
			named := shownBy.FindStringSubmatch(name)
			if named == nil {
				t.Errorf("%q names no test: %s", name, line)
				continue
			}
			if !declared.has(t, named[1], named[2]) {
				t.Errorf("there is no test %s.%s: %s", named[1], named[2], line)
			}
		}
	}
	if lines < 20 {
		t.Errorf("%d lines, of which at least 20 were expected", lines)
	}
}
