package kube

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"path/filepath"
	"strings"

	"sigs.k8s.io/yaml"
)

// documents returns the documents of a manifest as JSON, without empty ones.
func documents(name string, content []byte) ([]json.RawMessage, error) {
	if filepath.Ext(name) == ".json" {
		return jsonDocuments(content)
	}
	var docs []json.RawMessage
	for line, text := range splitYAML(content) {
		doc, err := yaml.YAMLToJSONStrict(text)
		if err != nil {
			// Parse again with the lines before it, so that the error has the line of the file.
			_, err = yaml.YAMLToJSONStrict(append(bytes.Repeat([]byte("\n"), line), text...))
			return nil, err
		}
		if string(doc) != "null" {
			docs = append(docs, doc)
		}
	}
	return docs, nil
}

// splitYAML yields the documents of a YAML stream, each with the number of
// lines before it.
func splitYAML(content []byte) iter.Seq2[int, []byte] {
	return func(yield func(int, []byte) bool) {
		var doc []byte
		first, line := 0, 0
		for text := range bytes.Lines(content) {
			if rest, ok := separator(text); ok {
				if !yield(first, doc) {
					return
				}
				doc, first, text = nil, line, rest
			}
			doc = append(doc, text...)
			line++
		}
		yield(first, doc)
	}
}

// separator reports whether a line ends a document, and returns the rest of the line, with
// which the next one begins: "--- # comment" is allowed.
func separator(line []byte) (rest []byte, ok bool) {
	for _, mark := range []string{"---", "..."} {
		rest, ok := bytes.CutPrefix(line, []byte(mark))
		if ok && (len(rest) == 0 || strings.IndexByte(" \t\r\n", rest[0]) >= 0) {
			return rest, true
		}
	}
	return nil, false
}

func jsonDocuments(content []byte) ([]json.RawMessage, error) {
	var docs []json.RawMessage
	decoder := json.NewDecoder(bytes.NewReader(content))
	for {
		var doc json.RawMessage
		err := decoder.Decode(&doc)
		if errors.Is(err, io.EOF) {
			return docs, nil
		}
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", lineOf(content, err), err)
		}
		docs = append(docs, doc)
	}
}

// lineOf returns the line of a JSON error, or the last line if err has no offset.
func lineOf(content []byte, err error) int {
	var syntax *json.SyntaxError
	if errors.As(err, &syntax) && int(syntax.Offset) <= len(content) {
		content = content[:syntax.Offset]
	}
	return 1 + bytes.Count(bytes.TrimRight(content, "\n"), []byte("\n"))
}

// splitError splits an error of documents into its place and its message.
func splitError(err error) (field, message string) {
	message = strings.Join(strings.Fields(err.Error()), " ")
	message = strings.TrimPrefix(message, "yaml: ")
	message = strings.TrimPrefix(message, "unmarshal errors: ")
	line, rest, found := strings.Cut(message, ": ")
	if found && strings.HasPrefix(line, "line ") {
		return line, rest
	}
	return "content", message
}
