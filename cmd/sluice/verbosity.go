package main

import (
	"context"
	"flag"
	"io"
	"log/slog"
	"math"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	logsapi "k8s.io/component-base/logs/api/v1"
	"k8s.io/klog/v2"
)

// newLog returns the agent's log, which is that of Kubernetes' packages, too.
// Errors go to stderr and so does the rest, unless the streams are to be split.
func newLog(cfg *logsapi.LoggingConfiguration, stdout, stderr io.Writer) (*slog.Logger, error) {
	options := &slog.HandlerOptions{Level: slog.Level(math.MinInt)} // verbosity decides
	format := func(w io.Writer) slog.Handler { return slog.NewTextHandler(w, options) }
	split := cfg.Options.Text.SplitStream
	if cfg.Format == logsapi.JSONLogFormat {
		format = func(w io.Writer) slog.Handler { return slog.NewJSONHandler(w, options) }
		split = cfg.Options.JSON.SplitStream
	}
	handler := &verbosity{Handler: format(stderr), modules: cfg.VModule}
	handler.info = handler.Handler
	if split {
		handler.info = format(stdout)
	}
	log := slog.New(handler)
	klog.SetSlogLogger(log)

	// klog keeps the verbosity, so that what changes it there changes all.
	var flags flag.FlagSet
	klog.InitFlags(&flags)
	if err := flags.Set("v", strconv.Itoa(int(cfg.Verbosity))); err != nil {
		return nil, err
	}

	return log, flags.Set("vmodule", logsapi.VModuleConfigurationPflag(&cfg.VModule).String())
}

// verbosity passes on what klog's -v and --vmodule say. A level below that of
// information is klog's V of that number.
type verbosity struct {
	slog.Handler              // for errors and warnings
	info         slog.Handler // for the rest
	modules      logsapi.VModuleConfiguration
}

// Enabled also says yes if only some source files are to be heard at that level:
// Handle knows which.
func (v *verbosity) Enabled(_ context.Context, level slog.Level) bool {
	if level >= slog.LevelInfo || klog.V(klog.Level(-level)).Enabled() {
		return true
	}
	for _, m := range v.modules {
		if logsapi.VerbosityLevel(-level) <= m.Verbosity {
			return true
		}
	}

	return false
}

func (v *verbosity) Handle(ctx context.Context, record slog.Record) error {
	level := record.Level
	switch {
	case level > slog.LevelInfo:
		return v.Handler.Handle(ctx, record)
	case level == slog.LevelInfo || klog.V(klog.Level(-level)).Enabled() || v.heard(record):
		return v.info.Handle(ctx, record)
	}

	return nil
}

// heard says that the source file of the record is among the modules. The first
// that matches counts.
func (v *verbosity) heard(record slog.Record) bool {
	frame, _ := runtime.CallersFrames([]uintptr{record.PC}).Next()
	file := strings.TrimSuffix(filepath.Base(frame.File), ".go")
	for _, m := range v.modules {
		if ok, err := filepath.Match(m.FilePattern, file); ok && err == nil {
			return logsapi.VerbosityLevel(-record.Level) <= m.Verbosity
		}
	}

	return false
}

func (v *verbosity) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &verbosity{v.Handler.WithAttrs(attrs), v.info.WithAttrs(attrs), v.modules}
}

func (v *verbosity) WithGroup(name string) slog.Handler {
	return &verbosity{v.Handler.WithGroup(name), v.info.WithGroup(name), v.modules}
}
