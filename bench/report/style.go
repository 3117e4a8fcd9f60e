package report

import (
	"image/color"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
)

// sans is the typeface of the plots.
var sans = font.Font{Typeface: "Liberation", Variant: "Sans"}

// look is what a side looks like in every plot.
type look struct {
	color color.Color
	shape draw.GlyphDrawer
}

// looks are distinguishable without colours, and for those who see few.
var looks = map[string]look{
	Ref:            {color.RGBA{R: 0x60, G: 0x60, B: 0x60, A: 0xff}, draw.PlusGlyph{}},
	Sluice:         {color.RGBA{R: 0x00, G: 0x72, B: 0xb2, A: 0xff}, draw.CircleGlyph{}},
	IPTables:       {color.RGBA{R: 0xd5, G: 0x5e, B: 0x00, A: 0xff}, draw.PyramidGlyph{}},
	IPTablesLegacy: {color.RGBA{R: 0xcc, G: 0x8f, B: 0x00, A: 0xff}, draw.TriangleGlyph{}},
	NFTables:       {color.RGBA{R: 0x00, G: 0x9e, B: 0x73, A: 0xff}, draw.BoxGlyph{}},
	IPVS:           {color.RGBA{R: 0xcc, G: 0x79, B: 0xa7, A: 0xff}, draw.CrossGlyph{}},
}

// lookOf returns what a side looks like. One that is not in the table is black.
func lookOf(side string) look {
	if l, ok := looks[side]; ok {
		return l
	}

	return look{color.Black, draw.RingGlyph{}}
}

func (l look) glyph(dashed bool) draw.GlyphStyle {
	style := draw.GlyphStyle{Color: l.color, Radius: vg.Points(3.5), Shape: l.shape}
	if dashed {
		style.Radius = vg.Points(2.2)
	}

	return style
}

func (l look) line(dashed bool) draw.LineStyle {
	style := draw.LineStyle{Color: l.color, Width: vg.Points(1.6)}
	if dashed {
		style.Width = vg.Points(1.1)
		style.Dashes = []vg.Length{vg.Points(4), vg.Points(3)}
	}

	return style
}

var (
	gridStyle  = draw.LineStyle{Color: color.Gray{Y: 0xe2}, Width: vg.Points(0.6)}
	unityStyle = draw.LineStyle{Color: color.Gray{Y: 0x60}, Width: vg.Points(1), Dashes: []vg.Length{vg.Points(1.5), vg.Points(2)}}
)

// textStyle is that of words of a size in points.
func textStyle(size vg.Length) draw.TextStyle {
	return draw.TextStyle{Color: color.Black, Font: font.From(sans, size), Handler: plot.DefaultTextHandler}
}
