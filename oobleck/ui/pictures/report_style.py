"""The style sheet of a report, light and dark, for phones and wide screens. It loads nothing."""

from __future__ import annotations

STYLE = """
:root{color-scheme:light dark;--page:#fbfbfa;--card:#fff;--text:#1d2125;--soft:#5c6670;--edge:#dfe3e6;--good:#1f8a4c;
--rate:#2463c4;--nodes:#8a5cc2;--loss:#b4530f;--bad:#c62f2f;--degraded:#d99a1c;--starting:#7b8794;--idle:#b9c0c7;
--checkpoint:#1496a5;--redone:#8a5cc2;--stopping:#a3adb6}
@media(prefers-color-scheme:dark){:root{--page:#14171a;--card:#1c2024;--text:#e8eaec;--soft:#9aa5b0;--edge:#333a41;
--good:#4cc47e;--rate:#6ea8fe;--nodes:#b794f4;--loss:#f0a35e;--bad:#ff7b72;--degraded:#e3b341;--starting:#8b98a5;
--idle:#59636e;--checkpoint:#39c5d4;--redone:#b794f4;--stopping:#6e7a86}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1080px;margin:0 auto;padding:24px 16px 48px}
h1{font-size:1.5rem;margin:0;overflow-wrap:anywhere}h2{font-size:1.1rem;margin:0 0 12px}
section,header{background:var(--card);border:1px solid var(--edge);border-radius:10px;padding:16px;margin-bottom:16px;
min-width:0}
header p{margin:4px 0 0;color:var(--soft);overflow-wrap:anywhere}
.state{display:flex;align-items:baseline;gap:8px}.state::before{content:"";flex:none;width:9px;height:9px;border-radius:50%;
background:var(--good)}.state.failed::before{background:var(--bad)}.state.on::before{background:var(--rate)}
.facts{display:grid;grid-template-columns:repeat(8,auto);justify-content:space-between;gap:12px 20px;margin:20px 0 0}
.facts div{min-width:0}.facts dt{color:var(--soft);font-size:.8rem}.facts dd{margin:0;font-size:1.15rem;font-weight:600;
font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.chart{padding:8px 24px 24px 64px}.chart.marked{padding-top:24px}.chart+.caption{margin-top:20px}
.plot{position:relative;height:200px}
svg{position:absolute;inset:0;width:100%;height:100%;overflow:visible}
.grid{stroke:var(--edge);stroke-width:1;vector-effect:non-scaling-stroke}
.line{fill:none;stroke:currentColor;stroke-width:1.75;vector-effect:non-scaling-stroke;stroke-linejoin:round}
.area{fill:currentColor;opacity:.14;stroke:none}
.line.raw{opacity:.35}.value{fill:currentColor;opacity:0}.value:hover{opacity:.07}
.mark{stroke:var(--bad);stroke-width:1.5;stroke-dasharray:4 3;vector-effect:non-scaling-stroke}
.mark.calm{stroke:var(--soft)}
.m{position:absolute;bottom:100%;width:18%;margin-bottom:3px;color:var(--bad);font-size:.75rem;line-height:1.3;
overflow:hidden;text-overflow:ellipsis;white-space:nowrap}.m.calm{color:var(--soft)}
.norm{color:var(--checkpoint)}.lr{color:var(--nodes)}
.rate{color:var(--rate)}.nodes{color:var(--nodes)}.loss{color:var(--loss)}
.x,.y{position:absolute;color:var(--soft);font-size:.75rem;white-space:nowrap;font-variant-numeric:tabular-nums}
.y{right:100%;margin-right:8px;transform:translateY(-50%)}.x{top:100%;margin-top:6px;transform:translateX(-50%)}
.caption{color:var(--soft);font-size:.85rem;margin:0 0 4px}
.bar{display:flex;height:26px;border-radius:6px;overflow:hidden;background:var(--edge)}.bar i{display:block;height:100%}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 20px;margin:12px 0 0;padding:0;font-size:.9rem}
.legend i{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:6px}
.useful{background:var(--good)}.redone{background:var(--redone)}.reconfiguring{background:var(--bad)}
.degraded{background:var(--degraded)}.idle{background:var(--idle)}.starting{background:var(--starting)}
.checkpoint{background:var(--checkpoint)}.stopping{background:var(--stopping)}
.scroll{overflow-x:auto}
.job{display:grid;grid-template-columns:minmax(8rem,max-content) 1fr;gap:2px 16px;margin:0;font-size:.9rem}
.job dt{color:var(--soft)}.job dd{margin:0;min-width:0;overflow-wrap:anywhere}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:6px 12px 6px 0;border-bottom:1px solid var(--edge);white-space:nowrap;vertical-align:top}
th{color:var(--soft);font-weight:500}td.what{white-space:normal;min-width:180px}.num{text-align:right}
.incident{border-left:3px solid var(--bad);padding:2px 0 2px 12px;margin:0 0 16px}
.incident:last-child{margin-bottom:0}
.incident h3{font-size:1rem;margin:0 0 4px}
.incident dl{display:grid;grid-template-columns:5.5rem 1fr;gap:2px 8px;margin:0}
.incident dt{color:var(--soft)}.incident dd{margin:0;min-width:0;overflow-wrap:anywhere;white-space:pre-wrap}
details{border-top:1px solid var(--edge);padding:8px 0}summary{cursor:pointer;overflow-wrap:anywhere}
.pipeline{display:flex;flex-wrap:wrap;gap:6px;align-items:stretch;margin:8px 0 0}
.pipeline b{flex:0 0 8.5rem;font-weight:500;color:var(--soft);align-self:center}
.stage{flex:1 1 0;min-width:92px;overflow-wrap:anywhere;
border:1px solid var(--rate);border-radius:6px;padding:4px 8px;font-size:.85rem}
.stage small{display:block;color:var(--soft)}
footer{color:var(--soft);font-size:.8rem;text-align:center}
@media(max-width:1000px){.facts{grid-template-columns:repeat(4,1fr)}}
@media(max-width:520px){main{padding:12px 8px 32px}section,header{padding:12px}.chart{padding-left:52px}
.facts{grid-template-columns:1fr 1fr}.plot{height:160px}.incident dl{grid-template-columns:1fr}
.incident dt{margin-top:4px}.pipeline b{flex-basis:100%}
.recoveries thead{display:none}.recoveries tr{display:grid;grid-template-columns:1fr 1fr 1fr;gap:2px 8px;padding:10px 0;
border-bottom:1px solid var(--edge)}.recoveries td{border:0;padding:0}.recoveries td.what{grid-column:2/4}
.recoveries .num{text-align:left}.recoveries .num::before{content:attr(data-name);display:block;color:var(--soft);
font-size:.8rem}}
@media print{body{background:#fff}section,header{break-inside:avoid}}
"""
