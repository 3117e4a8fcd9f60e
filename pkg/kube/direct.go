package kube

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/streaming"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/scheme"
	restwatch "k8s.io/client-go/rest/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"
)

// directWatch returns a watch of EndpointSlices that does not hand each event to the
// Reflector, which is another goroutine: the one that reads the connection puts it into the
// store itself, and has the sink flushed when it has read all there is. The Reflector remains
// in charge of everything else: when to list, when to watch, from where, and what to do about
// errors.
func directWatch(stream *Stream, into *store) cache.WatchFuncWithContext {
	return func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
		selectSlices(&options)
		options.Watch = true
		request := stream.client.Get().Resource("endpointslices").VersionedParams(&options, scheme.ParameterCodec)
		if options.TimeoutSeconds != nil {
			request.Timeout(time.Duration(*options.TimeoutSeconds) * time.Second)
		}
		body, err := request.Stream(ctx)
		switch {
		case err == nil:
		case utilnet.IsProbableEOF(err) || utilnet.IsTimeout(err): // as Request.Watch has it: try again
			return watch.NewEmptyWatch(), nil
		default:
			return nil, err
		}
		d := &direct{source: &decoder{body: body}, store: into, ended: ctx.Done()}
		if ptr.Deref(options.SendInitialEvents, false) {
			d.listed = into.awaitReplace()
		}
		reporter := apierrors.NewClientErrorReporter(http.StatusInternalServerError, "watch", "ClientWatchDecoding")

		return watch.NewStreamWatcher(d, reporter), nil
	}
}

// direct is the decoder of a watch. Decode returns only what is for the Reflector: the objects
// of a streamed list, bookmarks and errors. All other events go to the store.
type direct struct {
	source *decoder
	store  *store
	ended  <-chan struct{} // with the context of the watch
	// listed is closed when the store has the list that the stream begins with; nil: it has
	// all that the stream does not bring.
	listed     <-chan struct{}
	listPassed bool // the Reflector has all of the list
	// version is that of the last object that the store was given, if the Reflector has not
	// heard of it. It has to before it asks the server for anything else.
	version string
	held    *event // comes after the bookmark that says the version
}

// event is what a decoder returns.
type event struct {
	kind watch.EventType
	obj  runtime.Object
	err  error
}

// Decode implements [watch.Decoder].
func (d *direct) Decode() (watch.EventType, runtime.Object, error) {
	if e := d.held; e != nil {
		d.held = nil

		return e.kind, e.obj, e.err
	}
	if d.listPassed && d.listed != nil {
		select {
		case <-d.listed:
			d.listed = nil
		case <-d.ended:
			return "", nil, io.EOF
		}
	}
	for {
		kind, obj, err := d.source.decode()
		slice, _ := obj.(*discoveryv1.EndpointSlice)
		switch {
		case err != nil || kind == watch.Error:
			d.store.ledger.sink.Flush()
			if d.version == "" {
				return kind, obj, err
			}
			d.held = &event{kind, obj, err}
			kind, err = watch.Bookmark, nil
			obj = &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{ResourceVersion: d.version}}
			d.version = ""

			return kind, obj, err
		case slice == nil || d.listed != nil && kind != watch.Bookmark:
			return kind, obj, nil
		case kind == watch.Bookmark:
			d.version = ""
			d.listPassed = d.listPassed || slice.Annotations[metav1.InitialEventsAnnotationKey] == "true"

			return kind, obj, nil
		}
		d.store.put(kind, slice)
		d.version = slice.ResourceVersion
	}
}

// Close implements [watch.Decoder].
func (d *direct) Close() { _ = d.source.body.Close() } // all of it that counts has been read

// decoder decodes the events of a watch of EndpointSlices: protobuf or JSON, whatever the
// server prefers of what the client accepts.
type decoder struct {
	body io.ReadCloser
	from *bufio.Reader      // body, once it begins
	json *restwatch.Decoder // nil: it is protobuf
	// other decodes objects that are no slices, which is what a server says of an error.
	other runtime.Decoder

	// These are used again for each event.
	size   [4]byte
	frame  []byte
	event  metav1.WatchEvent
	object runtime.Unknown
}

// maxEvent is how many bytes an event may have. It is client-go's limit.
const maxEvent = 16 << 20

// begin finds out what the server sends.
func (d *decoder) begin() error {
	d.from = bufio.NewReader(d.body)
	first, err := d.from.Peek(1)
	if err != nil {
		return err
	}
	isJSON := first[0] == '{' // as the length of a frame, it would be above the limit
	mediaType := runtime.ContentTypeProtobuf
	if isJSON {
		mediaType = runtime.ContentTypeJSON
	}
	negotiator := runtime.NewClientNegotiator(scheme.Codecs.WithoutConversion(), discoveryv1.SchemeGroupVersion)
	objects, events, framer, err := negotiator.StreamDecoder(mediaType, nil)
	if err != nil {
		return err
	}
	d.other = objects
	if isJSON {
		frames := framer.NewFrameReader(io.NopCloser(d.from))
		d.json = restwatch.NewDecoder(streaming.NewDecoder(frames, events), objects)
	}

	return nil
}

// decode returns the next event. Protobuf is decoded here: with what client-go does for any
// kind of objects it takes twice as long, and half of the garbage that a change makes is its.
func (d *decoder) decode() (watch.EventType, runtime.Object, error) {
	if d.from == nil {
		if err := d.begin(); err != nil {
			return "", nil, err
		}
	}
	if d.json != nil {
		return d.json.Decode()
	}
	if err := d.readFrame(); err != nil {
		return "", nil, err
	}
	d.event = metav1.WatchEvent{Object: runtime.RawExtension{Raw: d.event.Object.Raw[:0]}}
	if err := d.event.Unmarshal(d.frame); err != nil {
		return "", nil, err
	}
	kind := watch.EventType(d.event.Type)
	encoded, _ := bytes.CutPrefix(d.event.Object.Raw, []byte("k8s\x00"))
	d.object = runtime.Unknown{Raw: d.object.Raw[:0]}
	if err := d.object.Unmarshal(encoded); err != nil {
		return "", nil, err
	}
	if d.object.Kind != "EndpointSlice" || d.object.APIVersion != discoveryv1.SchemeGroupVersion.String() {
		obj, err := runtime.Decode(d.other, d.event.Object.Raw)

		return kind, obj, err
	}
	slice := &discoveryv1.EndpointSlice{}

	return kind, slice, slice.Unmarshal(d.object.Raw)
}

// readFrame reads what an event is encoded to: its length comes first.
func (d *decoder) readFrame() error {
	if _, err := io.ReadFull(d.from, d.size[:]); err != nil {
		return err
	}
	size := binary.BigEndian.Uint32(d.size[:])
	if size > maxEvent {
		return fmt.Errorf("an event of %d bytes: there are at most %d", size, maxEvent)
	}
	d.frame = slices.Grow(d.frame[:0], int(size))[:size]
	_, err := io.ReadFull(d.from, d.frame)
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}

	return err
}
