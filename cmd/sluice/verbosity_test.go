package main

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"testing"

	"k8s.io/klog/v2"

	"github.com/sluice-lb/sluice/test/lab"
)

// mustLog sets the log up for the flags and file ("none"). Afterwards klog is as
// before.
func mustLog(t *testing.T, stdout, stderr io.Writer, fields string, args ...string) *slog.Logger {
	t.Helper()
	t.Cleanup(func() {
		klog.ClearLogger()
		var flags flag.FlagSet
		klog.InitFlags(&flags)
		if err := flags.Set("v", "0"); err != nil {
			t.Error(err)
		}
		if err := flags.Set("vmodule", ""); err != nil {
			t.Error(err)
		}
	})
	log, err := newLog(&mustResolve(t, parse(t, fields, args...)).kubeProxy.Logging, stdout, stderr)
	lab.Must(t, err)

	return log
}

// Verbosity applies to Sluice's own log and to that of Kubernetes' packages, at V(1), V(3)
// and V(5).
func TestLogVerbosity(t *testing.T) {
	for _, test := range []struct {
		name, fields string
		args         []string
		want         string
	}{
		{"not more by default", "none", nil, "info info klog "},
		{"that of -v", "none", []string{"-v=3"}, "info V1 V3 info klog klogV1 klogV3 contextV1 contextV3 "},
		{"that of the file", "logging: {verbosity: 1}", nil, "info V1 info klog klogV1 contextV1 "},
		{"that of -v beside the file", "logging: {verbosity: 5}", []string{"-v=1"}, "info V1 info klog klogV1 contextV1 "},
		{"that of --vmodule for this source file", "none", []string{"--vmodule=other=9,verbosity_t*=3"}, "info V1 V3 info klog klogV1 klogV3 contextV1 contextV3 "},
		{"not more for another file", "none", []string{"--vmodule=other=9"}, "info info klog "},
		{"that of the file for this source file", "logging: {vmodule: [{filePattern: verbosity_test, verbosity: 1}]}", nil, "info V1 info klog klogV1 contextV1 "},
		{"that of the flag before the file", "logging: {vmodule: [{filePattern: verbosity_test, verbosity: 5}]}", []string{"--vmodule=verbosity_test=1"}, "info V1 info klog klogV1 contextV1 "},
	} {
		t.Run("it is "+test.name, func(t *testing.T) {
			var out bytes.Buffer
			log := mustLog(t, io.Discard, &out, test.fields, test.args...)
			if got := logged(log, &out); got != test.want {
				t.Errorf("logged %q, want %q", got, test.want)
			}
		})
	}
}

// logged logs in all ways, and returns what is written.
func logged(log *slog.Logger, out *bytes.Buffer) string {
	ctx := context.Background()
	log.Info("info")
	for _, v := range []int{1, 3, 5} {
		log.Log(ctx, slog.Level(-v), fmt.Sprint("V", v))
	}
	log.With("a", 1).WithGroup("g").Info("info")
	klog.InfoS("klog")
	for _, v := range []int{1, 3, 5} {
		klog.V(klog.Level(v)).InfoS(fmt.Sprint("klogV", v))
	}
	for _, v := range []int{1, 3, 5} {
		klog.FromContext(ctx).V(v).Info(fmt.Sprint("contextV", v))
	}
	var messages strings.Builder
	for line := range strings.Lines(out.String()) {
		_, rest, _ := strings.Cut(line, "msg=")
		word, _, _ := strings.Cut(rest, " ")
		fmt.Fprint(&messages, strings.TrimSpace(word), " ")
	}
	out.Reset()

	return messages.String()
}

// Setting klog's level, as PUT /debug/flags/v does, sets that of the whole log.
func TestVerbosityFollowsKlog(t *testing.T) {
	var out bytes.Buffer
	log := mustLog(t, io.Discard, &out, "none")
	var level klog.Level
	lab.Must(t, level.Set("3"))
	if got, want := logged(log, &out), "info V1 V3 info klog klogV1 klogV3 contextV1 contextV3 "; got != want {
		t.Errorf("logged %q, want %q", got, want)
	}
	lab.Must(t, level.Set("0"))
	if got, want := logged(log, &out), "info info klog "; got != want {
		t.Errorf("logged %q, want %q", got, want)
	}
}

func TestLogFormats(t *testing.T) {
	for _, test := range []struct {
		name, fields string
		args         []string
		json, split  bool
	}{
		{"text", "none", nil, false, false},
		{"JSON by a flag", "none", []string{"--logging-format=json"}, true, false},
		{"JSON by the file", "logging: {format: json}", nil, true, false},
		{"text in two streams", "none", []string{"--log-text-split-stream", "--feature-gates=LoggingAlphaOptions=true"}, false, true},
		{"JSON in two streams", "featureGates: {LoggingAlphaOptions: true}\nlogging: {format: json, options: {json: {splitStream: true}}}", nil, true, true},
		{"text in one stream, if JSON's would be two", "none", []string{"--log-json-split-stream", "--feature-gates=LoggingAlphaOptions=true"}, false, false},
	} {
		t.Run("it is "+test.name, func(t *testing.T) {
			var stdout, stderr bytes.Buffer
			log := mustLog(t, &stdout, &stderr, test.fields, test.args...)
			log.Info("first", "a", 1)
			log.Error("second", "a", 1)
			got, want := stderr.String(), 2
			if test.split {
				want = 1
				if n := strings.Count(stdout.String(), "first"); n != 1 {
					t.Errorf("stdout has %q", &stdout)
				}
			} else if stdout.Len() > 0 {
				t.Errorf("stdout has %q", &stdout)
			}
			lines := strings.Split(strings.TrimSpace(got), "\n")
			if len(lines) != want || !strings.Contains(lines[want-1], "second") {
				t.Fatalf("stderr has %q, want %d lines", got, want)
			}
			var fields map[string]any
			if err := json.Unmarshal([]byte(lines[0]), &fields); (err == nil) != test.json {
				t.Errorf("%s: %v", lines[0], err)
			}
		})
	}
}
