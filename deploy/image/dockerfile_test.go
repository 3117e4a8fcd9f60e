package main

import (
	"encoding/json"
	"os"
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// instruction is one of a Dockerfile, on one line.
type instruction struct {
	name, text string
}

// stages reads a Dockerfile: comments and line breaks go, arguments are put in.
func stages(t *testing.T, args *strings.Replacer) (all [][]instruction) {
	t.Helper()
	content, err := os.ReadFile("../../Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for line := range strings.Lines(string(content)) {
		if !strings.HasPrefix(line, "#") {
			lines = append(lines, line)
		}
	}
	text := strings.ReplaceAll(strings.Join(lines, ""), "\\\n", " ")
	for line := range strings.Lines(text) {
		name, rest, _ := strings.Cut(strings.Join(strings.Fields(line), " "), " ")
		if name == "FROM" {
			all = append(all, nil)
		}
		if name != "" {
			last := len(all) - 1
			all[last] = append(all[last], instruction{name, args.Replace(rest)})
		}
	}

	return all
}

// pairs reads a="b" c="d".
func pairs(t *testing.T, text string) (all []string) {
	t.Helper()
	for text != "" {
		name, rest, ok := strings.Cut(text, `="`)
		value, after, closed := strings.Cut(rest, `"`)
		if !ok || !closed {
			t.Fatalf("%q is not name=\"value\"", text)
		}
		all = append(all, name+"="+value)
		text = strings.TrimSpace(after)
	}

	return all
}

// The image of `make image` is the image of the Dockerfile: the last stage of
// that says nothing that the layout does not have, and the other way round.
func TestDockerfileIsTheSameImage(t *testing.T) {
	folder, _ := mustWrite(t, "v1.2.3")
	all := stages(t, strings.NewReplacer("$VERSION", "v1.2.3"))
	final := all[len(all)-1]
	want := v1.Config{WorkingDir: "/", Labels: make(map[string]string)} // as BuildKit has it
	var files []string
	for _, is := range final {
		switch is.name {
		case "FROM":
			if is.text != "scratch" {
				t.Errorf("the last stage is from %s, want scratch", is.text)
			}
		case "ARG":
		case "LABEL":
			for _, pair := range pairs(t, is.text) {
				name, value, _ := strings.Cut(pair, "=")
				want.Labels[name] = value
			}
		case "ENV":
			want.Env = append(want.Env, pairs(t, is.text)...)
		case "USER":
			want.User = is.text
		case "ENTRYPOINT":
			if err := json.Unmarshal([]byte(is.text), &want.Entrypoint); err != nil {
				t.Errorf("the entrypoint %s is for a shell, and there is none", is.text)
			}
		case "COPY":
			from, ok := strings.CutPrefix(is.text, "--from=build --chmod=0755 /sluice ")
			if !ok {
				t.Errorf("COPY %s: want the binary of the first stage, and mode 0755", is.text)
			}
			files = append(files, from)
		default:
			t.Errorf("the last stage has %s %s, which the layout does not", is.name, is.text)
		}
	}
	for platform, image := range mustImages(t, folder) {
		file, err := image.ConfigFile()
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, file.Config); diff != "" {
			t.Errorf("%s: the layout is not what the Dockerfile says (-Dockerfile +layout):\n%s", platform, diff)
		}
		var have []string
		for _, file := range mustFiles(t, image) {
			have = append(have, strings.Fields(file)[2])
		}
		if !slices.Equal(have, files) {
			t.Errorf("%s: the layout has the files %q, the Dockerfile %q", platform, have, files)
		}
	}
}

// Both build the binary by the same command, with the Go of go.mod.
func TestDockerfileBuildsAsTheLayout(t *testing.T) {
	build := stages(t, strings.NewReplacer(`"`, ""))[0]
	module, err := os.ReadFile("../../go.mod")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(module), "\ngo ")
	version, _, _ := strings.Cut(rest, "\n")
	if want := "--platform=$BUILDPLATFORM golang:" + version + " AS build"; build[0].text != want {
		t.Errorf("the first stage is from %s, want %s", build[0].text, want)
	}
	want := "CGO_ENABLED=0 GOOS=$TARGETOS GOARCH=$TARGETARCH go " +
		strings.Join(buildArgs("/sluice", "$VERSION"), " ")
	want = strings.ReplaceAll(want, modulePath, ".")
	if last := build[len(build)-1]; last.name != "RUN" || last.text != want {
		t.Errorf("the first stage ends with %s %s, want RUN %s", last.name, last.text, want)
	}
	if got := path.Join(modulePath, "cmd/sluice"); !slices.Contains(buildArgs("", ""), got) {
		t.Errorf("the layout has %q, want %s", buildArgs("", ""), got)
	}
	ignored, err := os.ReadFile("../../.dockerignore")
	if err != nil {
		t.Fatal(err)
	}
	for _, is := range build {
		if is.name != "COPY" {
			continue
		}
		words := strings.Fields(is.text)
		for _, source := range words[:len(words)-1] {
			if !strings.Contains(string(ignored), "\n!"+source+"\n") {
				t.Errorf("COPY %s: .dockerignore hides %s", is.text, source)
			}
		}
	}
}
