// Command helm lints and renders a chart with Helm's own packages, and takes the
// arguments of helm that the docs use. It is not all of Helm, which takes minutes to
// compile: it knows no repositories and no cluster.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"maps"
	"os"
	"slices"
	"strings"

	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"helm.sh/helm/v3/pkg/lint"
	"helm.sh/helm/v3/pkg/lint/support"
	"helm.sh/helm/v3/pkg/strvals"
)

func main() {
	log.SetOutput(io.Discard) // which Helm uses for what the errors say as well
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintf(os.Stderr, "Error: %v\n", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) < 2 {
		return errors.New("usage: helm lint|template|notes CHART [--namespace NAME] [--set NAME=VALUE] [--values FILE]")
	}
	verb, chart := args[0], args[1]
	values := make(map[string]any)
	flags := flag.NewFlagSet(verb, flag.ContinueOnError)
	namespace := flags.String("namespace", "default", "that of the release")
	flags.Func("set", "NAME=VALUE", func(text string) error { return strvals.ParseInto(text, values) })
	flags.Func("set-json", "NAME=JSON", func(text string) error { return strvals.ParseJSON(text, values) })
	flags.Func("values", "a file", func(path string) error {
		file, err := chartutil.ReadValuesFile(path)
		if err != nil {
			return err
		}
		values = chartutil.CoalesceTables(values, file)

		return nil
	})
	if err := flags.Parse(args[2:]); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("%q: no flag", flags.Args())
	}
	if verb == "lint" {
		return lintChart(chart, *namespace, values)
	}
	files, err := render(chart, *namespace, values)
	if err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if strings.HasSuffix(name, "NOTES.txt") == (verb == "notes") && strings.TrimSpace(files[name]) != "" {
			fmt.Printf("---\n# Source: %s\n%s\n", name, files[name])
		}
	}

	return nil
}

// lintChart returns an error for what Helm warns of, too.
func lintChart(chart, namespace string, values map[string]any) error {
	result := lint.All(chart, values, namespace, true)
	for _, message := range result.Messages {
		fmt.Println(message)
	}
	if result.HighestSeverity >= support.WarningSev {
		return errors.New("the chart has warnings")
	}

	return nil
}

// render returns the text of each template. Values that the chart's schema refuses are
// an error.
func render(path, namespace string, values map[string]any) (map[string]string, error) {
	chart, err := loader.Load(path)
	if err != nil {
		return nil, err
	}
	release := chartutil.ReleaseOptions{Name: "sluice", Namespace: namespace, Revision: 1, IsInstall: true}
	all, err := chartutil.ToRenderValues(chart, values, release, chartutil.DefaultCapabilities)
	if err != nil {
		return nil, err
	}

	return engine.Render(chart, all)
}
